"""Other systems' answers: each a function from a step to labelled programs, judged as ours are."""
