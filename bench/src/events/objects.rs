//! The Nodes and the ClusterMesh of the measurement. Member `m` (from 1 to 60) has up to 1,000 Nodes with agents' annotations.

use base64::{Engine, engine::general_purpose::STANDARD};
use clustermesh_lab::{ClusterPlan, LabPlan, NAMESPACE};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

/// The name of the ClusterMesh.
const MESH: &str = "prod";
/// How many clusters [`ClusterPlan::with_default_ranges`] can number.
const NUMBERED: usize = 24;

/// The API servers: the hub `m1`, and the other members `m2`, `m3` and so on.
pub(super) fn plan(members: usize) -> LabPlan {
    let cluster = |index: usize| {
        // The lab uses Pod and Service ranges only in clusters with nodes, so several clusters can have the same.
        let mut plan = ClusterPlan::with_default_ranges(index % NUMBERED, &name(index), 0);
        plan.controllers = false;
        plan.underlay = format!("172.30.{}.0/24", index + 1).parse().expect("a network");
        plan
    };
    LabPlan {
        clusters: (0..members).map(cluster).collect(),
    }
}

/// The name of the member with this index.
pub(super) fn name(index: usize) -> String {
    format!("m{}", index + 1)
}

pub(super) fn node_name(index: usize, n: u16) -> String {
    format!("{}-{n}", name(index))
}

pub(super) fn api(client: &Client, group: &str, version: &str, kind: &str, plural: &str) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk(group, version, kind);
    Api::all_with(client.clone(), &ApiResource::from_gvk_with_plural(&kind, plural))
}

pub(super) fn peers(client: &Client) -> Api<DynamicObject> {
    api(client, "kilo.squat.ai", "v1alpha1", "Peer", "peers")
}

pub(super) fn nodes(client: &Client) -> Api<DynamicObject> {
    api(client, "", "v1", "Node", "nodes")
}

pub(super) fn meshes(client: &Client) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("kilo.squat.ai", "v1alpha1", "ClusterMesh");
    let resource = ApiResource::from_gvk_with_plural(&kind, "clustermeshes");
    Api::namespaced_with(client.clone(), NAMESPACE, &resource)
}

/// The endpoint of a node, without the port.
pub(super) fn address(index: usize, n: u16) -> String {
    format!("203.{}.{}.{}", index + 1, n / 250, n % 250 + 1)
}

/// Creates Node `n` (from 0) of a member.
pub(super) async fn create_node(client: &Client, index: usize, n: u16) -> anyhow::Result<()> {
    let (m, name, address) = (index + 1, node_name(index, n), address(index, n));
    let pods = format!("10.{m}.{}.{}/26", n / 4, n % 4 * 64);
    let mut key = [7; 32];
    (key[0], key[1], key[2]) = (u8::try_from(m)?, n.to_be_bytes()[0], n.to_be_bytes()[1]);
    let node = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "annotations": {
            "kilo.squat.ai/key": STANDARD.encode(key),
            "kilo.squat.ai/wireguard-ip": format!("100.{}.{}.{}/16", 64 + m, n / 250, n % 250 + 1),
            "kilo.squat.ai/endpoint": format!("{address}:51820"),
            "kilo.squat.ai/internal-ip": format!("{address}/32"),
            "kilo.squat.ai/granularity": "full",
            "kilo-clustermesh.io/agent": json!({
                "version": env!("CARGO_PKG_VERSION"), "backend": "userspace", "mode": "full", "mtu": 1420,
            }).to_string(),
        }},
        "spec": {"podCIDR": pods, "podCIDRs": [pods]},
    });
    let status = json!({"status": {
        "addresses": [{"type": "InternalIP", "address": address}],
        "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": null, "lastTransitionTime": null}],
    }});
    let nodes = nodes(client);
    let object = serde_json::from_value(node)?;
    nodes.create(&PostParams::default(), &object).await?;
    let params = PatchParams::default();
    nodes.patch_status(&name, &params, &Patch::Merge(&status)).await?;
    Ok(())
}

/// Creates the ClusterMesh of all members.
pub(super) async fn create_mesh(hub: &Client, members: usize) -> anyhow::Result<()> {
    let entry = |index: usize| {
        let (m, name) = (index + 1, name(index));
        let networks = [
            format!("10.{m}.0.0/16"),
            format!("100.{}.0.0/16", 64 + m),
            format!("203.{m}.0.0/16"),
        ];
        match index {
            0 => json!({"name": name, "local": true, "allowedNetworks": networks}),
            _ => json!({
                "name": name, "kubeconfigSecretRef": {"name": format!("{name}-kubeconfig")}, "allowedNetworks": networks,
            }),
        }
    };
    let entries: Vec<Value> = (0..members).map(entry).collect();
    let mesh = json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "ClusterMesh",
        "metadata": {"name": MESH, "namespace": NAMESPACE}, "spec": {"clusters": entries},
    });
    let object = serde_json::from_value(mesh)?;
    meshes(hub).create(&PostParams::default(), &object).await?;
    Ok(())
}

/// Deletes the ClusterMesh while no controller runs, so that all objects in the members stay.
pub(super) async fn delete_mesh(hub: &Client) -> anyhow::Result<()> {
    let finalizers = json!({"metadata": {"finalizers": null}});
    let meshes = meshes(hub);
    meshes
        .patch(MESH, &PatchParams::default(), &Patch::Merge(&finalizers))
        .await?;
    meshes.delete(MESH, &Default::default()).await?;
    Ok(())
}
