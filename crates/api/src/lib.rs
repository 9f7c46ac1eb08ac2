//! The Kubernetes types of the project (ClusterMesh, PeerPolicy, SandboxAccess, SandboxGateway, Kilo's Peer and annotations), and
//! conversions between them and the plain values of `clustermesh_core`.
//!
//! # Example
//!
//! [`convert::mesh::to_core`] checks a ClusterMesh, and names each field that is wrong:
//!
//! ```
//! use clustermesh_api::{convert, mesh::ClusterMesh};
//!
//! let mut mesh: ClusterMesh = serde_json::from_value(serde_json::json!({
//!     "apiVersion": "kilo.squat.ai/v1alpha1",
//!     "kind": "ClusterMesh",
//!     "metadata": {"name": "demo", "namespace": "clustermesh"},
//!     "spec": {"clusters": [
//!         {"name": "hub", "local": true, "allowedNetworks": ["10.10.0.0/16"]},
//!         {"name": "edge", "kubeconfigSecretRef": {"name": "edge"}, "allowedNetworks": ["10.20.0.0/16"]},
//!     ]},
//! }))?;
//! let (core, warnings) = convert::mesh::to_core(&mesh).unwrap();
//! assert_eq!((&*core.clusters[1].name, warnings.len()), ("edge", 0));
//!
//! mesh.spec.clusters[1].allowed_networks = vec!["10.20.0.0/33".into()];
//! let findings = convert::mesh::to_core(&mesh).unwrap_err();
//! assert_eq!(findings[0].field, "spec.clusters[1].allowedNetworks[0]");
//! # Ok::<(), serde_json::Error>(())
//! ```
#![forbid(unsafe_code)]

pub mod annotations;
pub mod convert;
pub mod crds;
pub mod mesh;
pub mod names;
pub mod peer;
pub mod policy;
pub mod revision;
pub mod sandbox;
mod schema;
pub mod versions;
