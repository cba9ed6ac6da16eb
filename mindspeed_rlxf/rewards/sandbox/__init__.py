"""Run programs that a policy wrote, isolated as strongly as this host allows.

runner.py:  what a process uses: choose a level, run a program
levels.py:  levels of isolation, and what each one prevents
warden.py:  a process of its own that starts, watches and ends programs
launch.py:  one way to start a program per level
rights.py:  the user and the rights of a program
root.py:    the root of a mount namespace
view.py:    files that a program sees
limits.py:  limits of the kernel for each process
processes.py: descendants of a process, and what they use
filter.py:  system calls that are refused
linux.py:   system calls that Python has no function for
"""
