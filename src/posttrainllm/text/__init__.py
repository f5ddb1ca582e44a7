"""Text in, token ids out: files, corpora, tokenizers, and what counting alone says about a text."""
