//! The testkit: network namespaces, attackers, nodes and their traffic, for the test programs of this package and of
//! `wg-agent`.
#![allow(missing_docs, reason = "names and types say it, as in any test")]

pub mod agent;
pub mod attacker;
pub mod contract;
pub mod netns;
pub mod pair;
pub mod path;
pub mod test_env;
pub mod traffic;

/// The path of a program of this workspace, which must have been built.
pub fn program(name: &str) -> String {
    let path = clustermesh_lab::our_program(name).unwrap_or_else(|error| panic!("{error}"));
    path.display().to_string()
}
