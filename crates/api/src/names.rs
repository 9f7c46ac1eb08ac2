//! The labels, annotations and finalizers that the project uses in clusters, and the names of the objects that it writes.
//! "(predecessor)" marks those that kilo-clustermesh-operator, the predecessor, also uses.
//!
//! [`crate::convert`] and [`crate::annotations`] read and write the values.

use clustermesh_core::{
    mesh::{ClusterIdentity, MeshId, ObjectName},
    plan::Naming,
};
use sha2::{Digest, Sha256};

/// Annotation of the leader's Lease in the hub: the replica that released the Lease, after its last write.
pub const RELEASED_BY: &str = "kilo-clustermesh.io/released-by";
/// Annotation of a released Lease of the leader in the hub: an API server may still execute a request of the replica that
/// released the Lease, or of an earlier leader.
pub const LATE_WRITES: &str = "kilo-clustermesh.io/late-writes";

/// Finalizer of a ClusterMesh until all objects that were written for it are removed (predecessor).
pub const FINALIZER: &str = "kilo-clustermesh.io/cleanup";

/// Label: `metadata.name` of the ClusterMesh that an object belongs to (predecessor).
pub const LABEL_MESH: &str = "kilo-clustermesh.io/mesh";
/// Label: the entry of spec.clusters that an object describes (predecessor).
pub const LABEL_SOURCE_CLUSTER: &str = "kilo-clustermesh.io/source-cluster";
/// Label: `metadata.namespace` of the ClusterMesh.
pub const LABEL_MESH_NAMESPACE: &str = "kilo-clustermesh.io/mesh-namespace";
/// Label: id of the hub whose controller wrote an object (`--hub-id`).
pub const LABEL_HUB: &str = "kilo-clustermesh.io/hub";
/// Label that marks mirrored Services and their EndpointSlices.
pub const LABEL_MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// Label that names the manager of an EndpointSlice. Each of Kubernetes' own controllers ignores slices with a value other than its own.
pub const LABEL_SLICE_MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";
/// Value of [`LABEL_MANAGED_BY`] and [`LABEL_SLICE_MANAGED_BY`] on mirrored Services and their EndpointSlices.
pub const MANAGED_BY: &str = "kilo-clustermesh.io";
/// Label of gateway pods, with the value [`GATEWAY_APP`]; deploy/gateway.yaml sets it.
pub const LABEL_APP: &str = "app.kubernetes.io/name";
/// See [`LABEL_APP`].
pub const GATEWAY_APP: &str = "clustermesh-gateway";
/// Label that ties an EndpointSlice to its Service (Kubernetes).
pub const LABEL_SERVICE_NAME: &str = "kubernetes.io/service-name";
/// Label with the location of a node that has no [`KILO_LOCATION`] (Kubernetes; the default of Kilo's `--topology-label`).
pub const LABEL_REGION: &str = "topology.kubernetes.io/region";

/// ClusterMesh annotation of Cluster API: any value except `false` pauses the mesh.
pub const PAUSED: &str = "cluster.x-k8s.io/paused";
/// ClusterMesh annotation: id of another hub, whose Peers for this mesh are adopted.
pub const ADOPT_HUB: &str = "kilo-clustermesh.io/adopt-hub";
/// ClusterMesh annotation: entries to quarantine, comma-separated, in addition to those whose `quarantine` is true.
pub const QUARANTINE: &str = "kilo-clustermesh.io/quarantine";
/// Annotation that `clusterctl move` sets on an object before it deletes the object in this hub. Another hub then
/// has a copy, so the objects in the members must stay.
pub const DELETE_FOR_MOVE: &str = "clusterctl.cluster.x-k8s.io/delete-for-move";
/// ClusterMesh annotation: clusters, comma-separated, whose objects are left in place if they cannot be removed. `true` or empty = every
/// cluster, but only while the ClusterMesh is being deleted.
pub const FORCE_CLEANUP: &str = "kilo-clustermesh.io/force-cleanup";
/// Service annotation: namespaces of the hub whose ClusterMeshes may grant the Service, comma-separated.
pub const ALLOWED_FROM: &str = "kilo-clustermesh.io/allowed-from";

/// Peer annotation: all endpoint candidates in order of preference, `ip:port`, comma-separated.
pub const PEER_ENDPOINTS: &str = "kilo-clustermesh.io/endpoints";
/// Peer annotation with the value `true`: the Peer describes a gateway.
pub const PEER_GATEWAY: &str = "kilo-clustermesh.io/gateway";
/// Peer annotation: location of the described node, if it is a node of the cluster in which the Peer is.
pub const PEER_LOCATION: &str = "kilo-clustermesh.io/location";
/// Node annotation: the status of wg-agent, JSON.
pub const NODE_AGENT: &str = "kilo-clustermesh.io/agent";

/// Node annotation of Kilo: base64 public key.
pub const KILO_KEY: &str = "kilo.squat.ai/key";
/// Node annotation of Kilo: address of the WireGuard device, `host/prefix`; empty if the node is not a leader.
pub const KILO_WIREGUARD_IP: &str = "kilo.squat.ai/wireguard-ip";
/// Node annotation of Kilo: WireGuard endpoint, `host:port`.
pub const KILO_ENDPOINT: &str = "kilo.squat.ai/endpoint";
/// Node annotation that users set for Kilo: `host:port`, which replaces the endpoint that Kilo found.
pub const KILO_FORCE_ENDPOINT: &str = "kilo.squat.ai/force-endpoint";
/// Node annotation that users set: endpoint for the mesh only, `host:port` (predecessor).
pub const KILO_CLUSTERMESH_ENDPOINT: &str = "kilo.squat.ai/clustermesh-endpoint";
/// Node annotation of Kilo: private address, `host/prefix`, or empty.
pub const KILO_INTERNAL_IP: &str = "kilo.squat.ai/internal-ip";
/// Node annotation of Kilo: Unix seconds of kg's last check-in, every 30 s.
pub const KILO_LAST_SEEN: &str = "kilo.squat.ai/last-seen";
/// Node annotation of Kilo: `location`, `full` or `cross`.
pub const KILO_GRANULARITY: &str = "kilo.squat.ai/granularity";
/// Node annotation that users set for Kilo: location of the node.
pub const KILO_LOCATION: &str = "kilo.squat.ai/location";
/// Node annotation that users set for Kilo, with any value: kg prefers the node as leader of its location.
pub const KILO_LEADER: &str = "kilo.squat.ai/leader";
/// Node annotation that users set for Kilo if the node is behind NAT: seconds between keepalives.
pub const KILO_PERSISTENT_KEEPALIVE: &str = "kilo.squat.ai/persistent-keepalive";
/// Node annotation that users set for Kilo: additional networks of the location, comma-separated.
pub const KILO_ALLOWED_LOCATION_IPS: &str = "kilo.squat.ai/allowed-location-ips";
/// Node annotation of Kilo: the live endpoints of peers as the node observes them, by public key, JSON.
pub const KILO_DISCOVERED_ENDPOINTS: &str = "kilo.squat.ai/discovered-endpoints";

/// The longest name of an object.
const MAX_NAME: usize = 253;
/// The length of the suffix: `-` and 8 hex digits.
const SUFFIX_LENGTH: usize = 9;

/// Names of written objects, for one hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    /// The hub's id, which is the value of [`LABEL_HUB`].
    pub hub: String,
}

impl Naming for Names {
    fn peer(&self, mesh: &MeshId, cluster: &str, node: &str, is_name_taken: bool) -> String {
        peer_name(&self.hub, mesh, cluster, node, is_name_taken)
    }

    fn policy(&self, mesh: &MeshId, cluster: &str, is_name_taken: bool) -> String {
        policy_name(&self.hub, mesh, cluster, is_name_taken)
    }

    fn sandbox_id(&self, identity: &ClusterIdentity) -> String {
        hash(&[&self.hub, &identity.to_string()])
    }

    fn slice(&self, mesh: &MeshId, service: &ObjectName, v6: bool, index: usize) -> String {
        let hash = hash(&[
            &self.hub,
            &mesh.namespace,
            &mesh.name,
            &service.namespace,
            &service.name,
        ]);
        let family = if v6 { 6 } else { 4 };
        format!("{}-{hash}-v{family}-{index}", subdomain(&service.name, 63))
    }
}

/// Makes the name of a Peer: `<mesh>--<cluster>--<node>`, as the predecessor does. A hash of hub, namespace, mesh, cluster and node
/// (8 hex digits) is appended if that name is ambiguous, too long or invalid, or if another owner's Peer has it (`is_name_taken`).
#[must_use]
pub fn peer_name(hub: &str, mesh: &MeshId, cluster: &str, node: &str, is_name_taken: bool) -> String {
    join(&[&mesh.name, cluster, node], is_name_taken, || {
        hash(&[hub, &mesh.namespace, &mesh.name, cluster, node])
    })
}

/// Makes the name of the Lease of this hub's controller in a member.
#[must_use]
pub fn lease_name(hub: &str) -> String {
    format!("clustermesh-controller-{}", hash(&[hub]))
}

/// Makes the name of a PeerPolicy: `<mesh>--<cluster>`, with a hash in the same cases as in [`peer_name`].
#[must_use]
pub fn policy_name(hub: &str, mesh: &MeshId, cluster: &str, is_name_taken: bool) -> String {
    join(&[&mesh.name, cluster], is_name_taken, || {
        hash(&[hub, &mesh.namespace, &mesh.name, cluster])
    })
}

fn join(parts: &[&str], is_name_taken: bool, hash: impl FnOnce() -> String) -> String {
    let readable = parts.join("--");
    // Different parts could give the same name if one contains `--`, or is not a valid name (`a-`, `-b`).
    let is_ambiguous = parts.iter().any(|part| part.contains("--") || !is_subdomain(part));
    if is_name_taken || is_ambiguous || readable.len() > MAX_NAME {
        format!("{}-{}", subdomain(&readable, MAX_NAME - SUFFIX_LENGTH), hash())
    } else {
        readable
    }
}

/// Hashes the length of each part and then the part, so that different lists of parts never give the same hash input.
fn hash(parts: &[&str]) -> String {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_be_bytes());
        hasher.update(part.as_bytes());
    }
    hasher
        .finalize()
        .iter()
        .take(4)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Converts `text` to a valid beginning of an object name, at most `max` bytes long. A hostile API server can choose any names for
/// its nodes, and object names are used in the paths of requests, so invalid characters are replaced.
fn subdomain(text: &str, max: usize) -> String {
    let trim = |text: &str| text.trim_end_matches(['-', '.']).to_owned();
    if is_subdomain(text) {
        return trim(&text[..text.len().min(max)]);
    }
    let plain: String = text
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() {
                c.to_ascii_lowercase()
            } else {
                '-'
            }
        })
        .skip_while(|c| *c == '-')
        .take(max)
        .collect();
    let plain = trim(&plain);
    if plain.is_empty() { "x".to_owned() } else { plain }
}

/// Whether `text` is an RFC 1123 subdomain as defined by Kubernetes: labels of lower-case letters, digits and inner hyphens, separated
/// by dots.
pub(crate) fn is_subdomain(text: &str) -> bool {
    (1..=MAX_NAME).contains(&text.len()) && text.split('.').all(is_label_of_any_length)
}

/// Whether `text` is an RFC 1123 label of at most 63 characters.
pub(crate) fn is_label(text: &str) -> bool {
    text.len() <= 63 && is_label_of_any_length(text)
}

fn is_label_of_any_length(text: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = text.as_bytes();
    bytes.first().copied().is_some_and(plain)
        && bytes.last().copied().is_some_and(plain)
        && bytes.iter().all(|b| plain(*b) || *b == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh() -> MeshId {
        MeshId {
            namespace: "ns".into(),
            name: "prod".into(),
        }
    }

    #[test]
    fn plain_name_has_the_form_of_the_predecessor() {
        assert_eq!(
            peer_name("hub", &mesh(), "tenant-a", "worker-1.example", false),
            "prod--tenant-a--worker-1.example"
        );
        assert_eq!(policy_name("hub", &mesh(), "tenant-a", false), "prod--tenant-a");
    }

    #[test]
    fn ambiguous_parts_get_different_names() {
        let one = peer_name("hub", &mesh(), "a--b", "c", false);
        let other = peer_name("hub", &mesh(), "a", "b--c", false);
        assert_ne!(one, other);
        assert!(
            one.starts_with("prod--a--b--c-") && one.len() == "prod--a--b--c-".len() + 8,
            "{one}"
        );
    }

    #[test]
    fn name_with_hash_differs_by_hub_and_by_namespace() {
        let name = |hub: &str, namespace: &str| {
            peer_name(
                hub,
                &MeshId {
                    namespace: namespace.into(),
                    name: "prod".into(),
                },
                "a",
                "n",
                true,
            )
        };
        assert_eq!(name("one", "x"), name("one", "x"));
        assert_ne!(name("one", "x"), name("two", "x"));
        assert_ne!(name("one", "x"), name("one", "y"));
    }

    #[test]
    fn long_name_is_truncated_and_stays_valid() {
        let node = format!("{}.{}", "n".repeat(63), "m-".repeat(120));
        let name = peer_name("hub", &mesh(), &"c".repeat(63), node.trim_end_matches('-'), false);
        assert!(name.len() <= MAX_NAME && is_subdomain(&name), "{name}");
    }

    // threat: hostile-names
    #[test]
    fn hostile_node_names_give_valid_object_names() {
        for node in [
            "../../api/v1/secrets",
            "",
            "a..b",
            "-",
            "é",
            "A",
            "n?x=1",
            "x/",
            "a.-b",
            "--",
        ] {
            let name = peer_name("hub", &mesh(), "c", node, false);
            assert!(is_subdomain(&name), "{node:?} became {name:?}");
        }
    }

    #[test]
    fn slice_names_differ_by_family_and_mesh() {
        let names = Names { hub: "hub".into() };
        let service = ObjectName {
            namespace: "team".into(),
            name: "db".into(),
        };
        let name = names.slice(&mesh(), &service, false, 0);
        assert!(name.starts_with("db-") && name.ends_with("-v4-0"), "{name}");
        assert_ne!(
            name,
            names.slice(
                &MeshId {
                    namespace: "ns".into(),
                    name: "test".into()
                },
                &service,
                false,
                0
            )
        );
        assert!(names.slice(&mesh(), &service, true, 1).ends_with("-v6-1"));
    }
}
