//! Tests the whole product on whole clusters, installed from `deploy/` as a user does. Needs root.

mod documents;
mod dual;
mod equal;
mod flows;
mod grants;
mod iptables;
mod ipv6_only;
mod kilo;
mod kubevirt;
mod locations;
mod members;
mod nat;
mod operations;
mod sandbox;
mod setup;
mod shared;
mod storage;
mod targets;
