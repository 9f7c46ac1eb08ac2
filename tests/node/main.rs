//! Tests the real agent against real API servers. Network namespaces act as nodes, and the tests act as the controller.
//! Needs root.

mod clock;
mod drift;
mod gateway;
mod hostile_member;
mod leaks;
mod multihomed;
mod one_agent;
mod paths;
mod policy_mode;
mod prepare;
mod restart;
mod scale;
mod status;
mod two_agents;
mod two_clusters;
