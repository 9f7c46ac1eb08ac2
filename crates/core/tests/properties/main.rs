//! Property tests: the rules of the planner hold for generated hostile input.

mod attacker;
mod plan;
mod sandbox;
