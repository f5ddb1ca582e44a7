"""Words that the site explains: two sentences on each, and the name of the picture beside them.

The pictures are drawn by ``web/src/components/site/pictures.ts``; a test holds the two lists together.
"""

from __future__ import annotations

from typing import Final


def _term(name: str, says: str, picture: str) -> dict[str, str]:
    return {"name": name, "says": says, "picture": picture}


TERMS: Final = {
    "loss": _term(
        "loss",
        "How surprised the model is by the next byte of the text, on average: 0 is never surprised. It is counted in "
        "nats; 5.55 is pure guessing among 256 bytes, and below 2 the text has words.",
        "falling",
    ),
    "val_loss": _term(
        "validation loss",
        "The loss on the last part of the text, which training never reads. If it rises while the training loss "
        "falls, the model learns the text by heart.",
        "split",
    ),
    "lines": _term(
        "the lines in the chart",
        "How far plain counting gets on this very text: how often each letter comes, or each letter after the one, "
        "two or three before it. A model below a line has learnt more than that table knows.",
        "lines",
    ),
    "step": _term(
        "step",
        "The model reads one batch of text, sees how wrong it was about every next byte, and changes all its numbers "
        "a little. A run is a few hundred to a few thousand of them.",
        "step",
    ),
    "parameters": _term(
        "parameters",
        "The numbers that training changes; they are all that a model knows. At the beginning they are random.",
        "network",
    ),
    "context": _term(
        "context",
        "How many bytes the model sees at once when it guesses the next one. What lies before that is forgotten.",
        "window",
    ),
    "token": _term(
        "token",
        "The unit that the model reads and writes. Here it is one byte: a letter, a space, a line feed.",
        "tokens",
    ),
    "preset": _term(
        "preset",
        "A size of the model with settings that are known to train it well. Larger ones take longer and, given enough"
        " steps, get further.",
        "sizes",
    ),
    "engine": _term(
        "engine",
        "What computes: WebGPU uses the graphics processor, WebAssembly the ordinary one. Both run the same program "
        "and give the same losses but for their last digits.",
        "chips",
    ),
    "sample": _term(
        "sample",
        "What the model writes at this moment, always with the same dice and after the same beginning: the coloured "
        "part, a piece of text that training never reads. So every change in it is something that was learnt.",
        "dice",
    ),
    "temperature": _term(
        "temperature",
        "Below 1 the model keeps to what it finds likely, above 1 it dares more. At 0 it always takes the likeliest "
        "byte.",
        "temperature",
    ),
    "top_k": _term(
        "top-k",
        "Only so many of the likeliest bytes may be chosen. 0 lets all take part.",
        "cut",
    ),
    "top_p": _term(
        "top-p",
        "Only the likeliest bytes that together reach this probability may be chosen. 1 lets all take part.",
        "cut",
    ),
    "seed": _term(
        "seed",
        "The number that all chance is drawn from. The same seed gives the same text again.",
        "dice",
    ),
    "probability": _term(
        "probability",
        "How sure the model was of this byte before it was chosen. The stronger the colour behind a letter, the less sure it was.",
        "bars",
    ),
    "attention": _term(
        "attention",
        "For each byte, every head looks back and takes something from some of the bytes before it. Thick lines show "
        "where this head looked from the byte you clicked.",
        "arcs",
    ),
    "learning_rate": _term(
        "learning rate",
        "How much a step changes the model. It rises during the warm-up and then falls, so that the end is fine work.",
        "schedule",
    ),
    "grad_norm": _term(
        "gradient norm",
        "How strongly the batch pulls at all numbers of the model together. Above the clip it is scaled down, so that"
        " one odd batch does no harm.",
        "arrow",
    ),
    "update_ratio": _term(
        "update ratio",
        "How far a step moves the numbers of a layer, compared with their size. About one in a thousand is healthy; "
        "far more is restless, far less is asleep.",
        "arrow",
    ),
    "perplexity": _term(
        "perplexity",
        "Among how many equally likely bytes the model hesitates. 256 is pure guessing, 1 is certainty.",
        "bars",
    ),
    "bits": _term(
        "bits per byte",
        "The loss in bits: how small the text could be pressed with this model. A plain byte has 8.",
        "falling",
    ),
    "epochs": _term(
        "passes",
        "How often the run reads as much text as there is. Many passes over a small text teach it by heart.",
        "loop",
    ),
    "smoothed": _term(
        "smoothed loss",
        "The loss of single steps jumps with their batches. The smooth line averages over the last ones, so that the "
        "trend is seen.",
        "falling",
    ),
    "words": _term(
        "real words",
        "How many of the words it wrote stand somewhere in the text it learnt from. Unseen text of the same kind does not reach 100 % "
        "either, because it has words of its own.",
        "tokens",
    ),
    "copy": _term(
        "longest copy",
        "The longest piece that the model wrote and that stands in the text word for word. Unseen text of the same "
        "kind shares short pieces too; much more than that is reciting.",
        "split",
    ),
}
