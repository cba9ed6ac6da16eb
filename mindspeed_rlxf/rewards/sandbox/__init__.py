"""Run programs that a policy wrote, isolated as strongly as this host allows.

runner.py:  choose a level and run programs; the rest of the package uses only this
levels.py:  levels of isolation, and what each one prevents
warden.py:  a separate process that starts, watches and ends programs
launch.py:  start a program, in one way per level
rights.py:  the user and the rights of a program
root.py:    the root of a mount namespace
view.py:    files that a program sees
limits.py:  limits of the kernel for each process
processes.py: descendants of a process, and their memory, threads and CPU time
filter.py:  system calls that are refused
linux.py:   system calls that Python has no function for
"""
