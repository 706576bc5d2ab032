"""Plan a run's memory and time from its manifest, without torch.

Plans raise OrreryError for family `hugging_face`, whose weights are unknown.
"""
