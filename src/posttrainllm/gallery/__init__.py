"""The gallery: small models that come with the package, and the texts and recipes they were trained with."""
