//! Property tests: the planner obeys its rules for generated input, also hostile input.

mod attacker;
mod follow;
mod locations;
mod plan;
mod sandbox;
