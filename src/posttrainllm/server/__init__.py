"""The playground's server: the built site, and the runs of this machine, on 127.0.0.1.

    app.py        routes, put together; read this first
    security.py   who may ask: hosts, origins, headers of every answer
    site.py       files of the built site: types, caching, compression
    run_api.py    runs over HTTP: list, read, write, rename, remove
    run_files.py  the names that a run folder may have, opened without following links
    uploads.py    a file that arrives: temporary, checked, renamed
    trash.py      removed runs, and how they come back
    holds.py      who is writing a run: a process, a tab
    live.py       what changes while a terminal trains, as server-sent events
    answers.py    refusals and files as HTTP answers
    serve.py      a free port, uvicorn, an orderly end

Nothing here trains, and nothing imports it but ``posttrainllm play``.
"""
