"""How the lab models are made: text, tokenizer, base, drafters. One command, `ssbench lab train`, runs it all."""
