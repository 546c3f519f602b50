"""A conformance session inside pytest: arms, plan, engine pool, judgement, record."""
