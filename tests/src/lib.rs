//! Helpers for the integration tests of this package and of `wg-agent`: network namespaces, nodes, traffic, attackers.
#![allow(missing_docs, reason = "test helpers: names and types explain themselves")]

pub mod agent;
pub mod attacker;
pub mod contract;
pub mod faulty;
pub mod https_server;
pub mod kubeconfig;
pub mod netns;
pub mod pair;
pub mod path;
pub mod sessions;
pub mod test_env;
pub mod traffic;

/// The path of a program of this workspace. Panics if the program has not been built.
pub fn program(name: &str) -> String {
    let path = clustermesh_lab::workspace_program(name).unwrap_or_else(|error| panic!("{error}"));
    path.display().to_string()
}
