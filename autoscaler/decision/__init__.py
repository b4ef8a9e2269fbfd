"""The decision itself: a pure function of policy, observation, memory and now."""
