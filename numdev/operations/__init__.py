"""Operations beside attention, each in one file: its problem, the steps of its policy, its implementations, its declaration."""
