"""Stands in for FlashInfer where no GPU is: the names and the collectives of its workspace creation.

Module, class and function names are those of FlashInfer 0.7.2 as far as stacks show them; the memory is
left out. What is collective there is collective here, over the same process group and in the same order.
"""
