"""What lies between the ranks of a job: whether they meet, reach each other, how fast, and whether they are alike.

`meeting` lets ranks find each other and says who is missing, `probe` is the server and the client behind a measurement,
`edges` says which pairs measure when and what was found, `comparison` whose versions and settings differ, `collective`
lets ring itself meet. `session` is the order of it all.
"""
