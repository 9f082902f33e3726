"""The files of a run, and all code that writes them.

    files.py        atomic writes, the error for a file that cannot be written, and the lock of a folder
    output.py       `--output-path`: checked before anything is computed, never overwritten by mistake, filled in one step
    provenance.py   where a result comes from (versions, devices, hashes), and whether a resumed run matches its start
    run_folder.py   a search's history, which is its state, and how it resumes
    parts.py        the finished parts of a run that measures many things, and how it resumes

`search` uses `RunFolder`, `compare` uses `Parts`. Like `evaluate` and `export`, `compare` writes its results in one step.
"""
