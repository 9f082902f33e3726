"""What a run leaves on the disk, and everything that writes there.

    files.py        a file is written whole or not at all; the error of one that cannot be written; the lock of a folder
    output.py       `--output-path`: checked before anything is computed, never overwritten by mistake, filled all at once
    provenance.py   where a result comes from: versions, devices, hashes; is a resumed run the one that was begun?
    run_folder.py   a search's history, which is its state, and how it resumes
    parts.py        the finished parts of a run that measures many things, and how it resumes

`search` keeps a `RunFolder`; `compare` keeps `Parts`, and like `evaluate` and `export` writes its results in one step.
"""
