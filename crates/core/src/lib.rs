//! Plans all meshes: computes the desired objects in each member cluster, the writes that lead to them, and the status.
//!
//! [`plan::plan`] turns all meshes and the observed state of their members into one [`plan::Plan`]. [`diff::diff`] lists the
//! writes for one member. [`status`] derives the conditions of a mesh. Everything here is a pure function over plain values:
//! no I/O, no clock (time is passed in), no Kubernetes client types.
//!
//! # Example
//!
//! A mesh of two clusters. The node of `hub` becomes a Peer in `edge`:
//!
//! ```
//! use clustermesh_core::{
//!     diff::{Action, diff},
//!     key::PublicKey,
//!     mesh::{Cluster, ClusterIdentity, Mesh, MeshId},
//!     observe::{Claim, Endpoint, Member, Node, Observation, Observations},
//!     plan::{Settings, plan},
//! };
//! # use clustermesh_core::mesh::{Addressing, Locations, ObjectName, PodNetwork, Profile};
//! # struct Names;
//! # impl clustermesh_core::plan::Naming for Names {
//! #     fn peer(&self, mesh: &MeshId, cluster: &str, node: &str, _: bool) -> String {
//! #         format!("{}--{cluster}--{node}", mesh.name)
//! #     }
//! #     fn policy(&self, mesh: &MeshId, cluster: &str, _: bool) -> String {
//! #         format!("{}--{cluster}", mesh.name)
//! #     }
//! #     fn sandbox_id(&self, identity: &ClusterIdentity) -> String {
//! #         identity.to_string()
//! #     }
//! #     fn slice(&self, _: &MeshId, service: &ObjectName, _: bool, index: usize) -> String {
//! #         format!("{}-{index}", service.name)
//! #     }
//! # }
//! # fn cluster(name: &str, identity: &ClusterIdentity, allowed: &[&str]) -> Cluster {
//! #     Cluster {
//! #         name: name.into(),
//! #         identity: identity.clone(),
//! #         profile: Profile::ClusterMeshed,
//! #         addressing: Addressing::Routed,
//! #         allowed: allowed.iter().map(|net| net.parse().unwrap()).collect(),
//! #         anchored: None,
//! #         previous_anchors: Default::default(),
//! #         anchors: 1,
//! #         pod_network: PodNetwork::PerNode,
//! #         exports: vec![],
//! #         wireguard_port: 51820,
//! #         persistent_keepalive: 0,
//! #         locations: Locations::Ignored,
//! #         endpoint_networks: vec![],
//! #         egress: vec![],
//! #         quarantine: false,
//! #         confined_to: None,
//! #         max_nodes: 5000,
//! #     }
//! # }
//!
//! let edge = ClusterIdentity::Secret {
//!     namespace: "meshes".into(),
//!     name: "edge-kubeconfig".into(),
//!     key: "value".into(),
//!     context: None,
//! };
//! let mesh = Mesh {
//!     id: MeshId { namespace: "meshes".into(), name: "demo".into() },
//!     clusters: vec![
//!         cluster("hub", &ClusterIdentity::Local, &["10.1.0.0/16", "100.66.1.0/24"]),
//!         cluster("edge", &edge, &["10.2.0.0/16", "100.66.2.0/24"]),
//!     ],
//!     created: 1,
//!     paused: false,
//!     deleting: false,
//!     adopt_hub: None,
//!     accepted: Default::default(),
//! };
//! // The observed state: `hub` has one node, `edge` has none. The Peer CRD is installed in both.
//! let node = Node {
//!     ready: true,
//!     public_key: Claim::Valid(PublicKey::new([1; 32])),
//!     wireguard_ip: Claim::Valid("100.66.1.1/24".parse().unwrap()),
//!     pod_cidrs: vec![Claim::Valid("10.1.7.0/24".parse().unwrap())],
//!     kilo_endpoint: Claim::Valid(Endpoint::Ip("192.0.2.1:51820".parse().unwrap())),
//!     ..Node::default()
//! };
//! let empty = Member { peers: Some([].into()), ..Member::default() };
//! let hub = Member { nodes: [("n1".to_owned(), node)].into(), ..empty.clone() };
//! let seen = Observations {
//!     members: [(ClusterIdentity::Local, Observation::Fresh(hub)), (edge.clone(), Observation::Fresh(empty.clone()))].into(),
//!     hub: "id-of-the-hub".into(),
//!     resolved: [].into(),
//! };
//!
//! let plan = plan(&[mesh], &seen, &Settings::default(), &Names);
//! let steps = diff(&plan, &edge, &empty);
//! assert_eq!((steps[0].action, steps[0].item.name()), (Action::Create, "demo--hub--n1".to_owned()));
//! ```
#![forbid(unsafe_code)]

pub mod checkin;
pub mod diff;
pub mod enforcement;
pub mod hash;
pub mod hub;
pub mod key;
pub mod lanes;
pub mod links;
pub mod mesh;
pub mod observe;
pub mod ownership;
pub mod pending;
pub mod plan;
pub mod planner;
pub mod status;
pub mod versions;
