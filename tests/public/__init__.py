"""Every public name with typical arguments, run on two checkouts and compared bit for bit.

    python -m tests.public --against OTHER_CHECKOUT [--device cuda] [--only 'linear.*']

Each checkout's library runs the cases of this checkout in a process of its own (`child`). The cases
(`cases/`, a file for each room) use public names only, so they run on any version of the library.
`surface` lists what is public; a test fails where no case uses it.
"""
