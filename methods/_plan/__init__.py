"""`ssbench plan`: what a step of each kind of drafter costs on this machine, before a drafter is trained."""
