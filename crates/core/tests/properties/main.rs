//! Property tests: the planner obeys its rules for generated hostile input.

mod attacker;
mod plan;
mod sandbox;
