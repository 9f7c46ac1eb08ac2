//! Tests the real agent in namespaces as nodes, against real API servers. The tests take the place of the controller.
//! Needs root.

mod drift;
mod gateway;
mod hostile_member;
mod leaks;
mod one_agent;
mod policy_mode;
mod prepare;
mod restart;
mod status;
mod two_agents;
mod two_clusters;
