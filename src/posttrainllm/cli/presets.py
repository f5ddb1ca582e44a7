"""``posttrainllm presets``: the sizes that are known to train well."""

from __future__ import annotations

import json

from posttrainllm.cli.options import AsJson


def presets(as_json: AsJson = False) -> None:
    """List the presets with their sizes and the memory that training takes."""
    from posttrainllm.cli.table import Column, print_table
    from posttrainllm.config import DEFAULT_PRESET, PRESETS, load_config
    from posttrainllm.model import training_programs
    from posttrainllm.plan import make_plan
    from posttrainllm.storage import show_bytes

    rows = []
    for name, row in PRESETS.items():
        config = load_config(name)
        programs = training_programs(config.model, config.optimizer, config.data.batch_size)
        rows.append(
            {
                "preset": name,
                "parameters": config.model.parameters(),
                "settings": row.settings(),
                "bytes": make_plan(*programs).nbytes,
                "summary": row.summary,
            }
        )
    if as_json:
        print(json.dumps(rows))
        return
    columns = [
        Column("preset"),
        Column("parameters", right=True),
        Column("layers/heads/width", right=True, goes=3),
        Column("batch x context", right=True, goes=2),
        Column("steps", right=True, goes=1),
        Column("rate", right=True, goes=4),
        Column("memory", right=True),
        Column("for", goes=5),
    ]
    print_table(
        columns,
        [
            [
                f"{name} (default)" if name == DEFAULT_PRESET else name,
                f"{found['parameters']:,}",
                f"{row.n_layer}/{row.n_head}/{row.n_embd}",
                f"{row.batch_size} x {row.n_ctx}",
                f"{row.steps:,}",
                f"{row.learning_rate:g}",
                show_bytes(int(str(found["bytes"]))),
                row.summary,
            ]
            for found, (name, row) in zip(rows, PRESETS.items(), strict=True)
        ],
    )
