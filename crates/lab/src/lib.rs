//! Runs Kubernetes clusters on one machine, for tests, the demo and the benchmarks.
//!
//! One etcd serves all clusters of a [`Lab`]. Each cluster has one of two sizes:
//! - **only an API server** ([`LabPlan::control_planes`]): ready in seconds;
//! - **a whole cluster** ([`LabPlan::clusters`]): also controller-manager, scheduler, DNS and nodes. Nodes are namespaces
//!   with containerd, kubelet, kube-proxy and CNI plugins.
//!
//! ```text
//!  owner (test, demo)  --pipe-->  supervisor (pid 1 of its own pid and mount namespace)
//!        |                          |-- etcd, API servers, controller-manager, scheduler   in netns "underlay"
//!        |  control.sock            |-- node mgmt-1: pid 1 -> containerd, kubelet, kube-proxy, lab CNI or flannel
//!        +------------------------->|-- node tenant-a-1 ...
//! ```
//! When the pipe closes, for any reason, the supervisor takes everything down, except after [`Lab::keep`]. If the supervisor is
//! killed, the kernel kills all processes of its pid namespace. Then nothing keeps the lab's network namespaces and mounts alive. So even
//! `kill -9` of the supervisor leaves only cgroup directories and plain files, which the next lab removes.
#![forbid(unsafe_code)]

mod attack;
mod boundary;
mod bypass;
mod capture;
mod cgroup;
mod cluster_api;
mod command;
mod control_plane;
mod error;
mod image;
mod kilo;
mod lab;
mod machine;
mod node;
mod pki;
mod plan;
mod product;
mod run;
mod scan;
mod supervisor;
mod tools;
mod traffic;
mod wait;

pub use attack::Attacker;
pub use boundary::Boundary;
pub use capture::{Capture, Captured};
pub use cluster_api::{MOVE_LABEL, clusterctl_move};
pub use command::{Output, Running};
pub use error::{Error, Result};
pub use image::ImageSpec;
pub use kilo::{Granularity, KG_BIN, Kilo};
pub use lab::{AuditedWrite, Cluster, Lab, Node};
pub use machine::{Clock, CommandEnd, Machine};
pub use plan::{ClusterPlan, HostNode, LabPlan, NatKind, NodeNetwork, NodePlan, PlanV6, PodNetwork, ProxyMode, Uplink};
pub use product::{
    AGENT_NAMESPACE, GATEWAYS, Gateway, Granted, MESH, NAMESPACE, Product, ProductImages, Tunnel, gateway_cidrs,
};
pub use run::{down_all, down_kept, running_labs, workspace_program};
pub use scan::{ALWAYS_SCANNED_PORTS, ConnectionWatch, EchoWatch, RepeatedScan};
pub use supervisor::stages;
pub use tools::{ArtefactSet, Tools, lab_home};
pub use traffic::{Answer, RunningPod, STORE, TrafficClient, WEB};
pub use wait::wait_until;
