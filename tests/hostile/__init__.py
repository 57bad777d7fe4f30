"""What attackers and faults do, grouped by who does it.

A file, a caller of the API, somebody who edits the databases, the train function, the operating system. Each group is a
table: the next case is one more line.
"""
