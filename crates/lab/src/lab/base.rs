//! Writes the base images of the lab. Installs DNS in a cluster that has nodes, and waits until the nodes are Ready.

use k8s_openapi::api::core::v1 as core;
use kube::ResourceExt;
use kube::api::{Api, ListParams};

use super::{Cluster, Lab, TIMEOUT};
use crate::{Error, ImageSpec, PodNetwork, Result, run, wait_until};

/// The device of flannel's VXLAN.
const FLANNEL_DEVICE: &str = "flannel.1";
/// Applets of busybox for which `lab.local/box:1` has links.
const APPLETS: &str = "sh ls cat ps ip ping nc wget httpd sleep echo env id hostname mkdir tail head grep sed awk date \
    nslookup ifconfig stat mount df true false od kill";

impl Lab {
    /// Writes `lab.local/pause:1`, `lab.local/box:1` (busybox and `/bin/probe`) and `lab.local/coredns:1`.
    pub(super) fn write_base_images(&self) -> Result<()> {
        let directory = self.directory().join("images");
        std::fs::create_dir_all(&directory).map_err(Error::io("create the image directory"))?;
        let probe = run::workspace_program("lab-probe")?;
        let pause = ImageSpec::new("lab.local/pause:1")
            .program(&probe, "/pause")?
            .entrypoint(&["/pause", "pause"]);
        pause.write(&directory.join("pause.tar"))?;
        let path = std::env::var_os("PATH").unwrap_or_default();
        let busybox = std::env::split_paths(&path)
            .map(|directory| directory.join("busybox"))
            .find(|p| p.is_file());
        let busybox = busybox.ok_or_else(|| Error::Missing {
            what: "the program busybox".into(),
            remedy: "install it (Debian, Ubuntu: busybox-static)".into(),
        })?;
        let box_image = ImageSpec::new("lab.local/box:1")
            .program(&probe, "/bin/probe")?
            .program(&busybox, "/bin/busybox")?;
        let box_image = APPLETS
            .split_whitespace()
            .fold(box_image.directory("/etc", 0o755), |image, applet| {
                image.link(&format!("/bin/{applet}"), "/bin/busybox")
            });
        box_image.entrypoint(&["/bin/sh"]).write(&directory.join("box.tar"))?;
        let dns = ImageSpec::new("lab.local/coredns:1").program(&self.tools.path("coredns")?, "/coredns")?;
        dns.entrypoint(&["/coredns"]).write(&directory.join("coredns.tar"))
    }
}

impl Cluster<'_> {
    pub(super) async fn install_dns(&self) -> Result<()> {
        let manifest = include_str!("dns.yaml").replace("CLUSTER_DNS", &self.plan().dns_ip().to_string());
        self.apply(&manifest).await
    }

    /// Waits until every powered-on node is Ready and has routes to the pods of all Ready nodes.
    ///
    /// # Errors
    /// After three minutes. The error names a node that is not Ready or lacks a route.
    pub async fn wait_for_nodes(&self) -> Result<()> {
        let api: Api<core::Node> = Api::all(self.client().await?);
        let what = format!("the nodes of {} to be Ready", self.plan().name);
        wait_until(what, TIMEOUT, async || {
            let nodes = api
                .list(&ListParams::default())
                .await
                .map_err(|error| error.to_string())?
                .items;
            let ready: Vec<_> = nodes
                .iter()
                .filter(|node| ready_heartbeat(node).is_some())
                .map(ResourceExt::name_any)
                .collect();
            for node in self.nodes().into_iter().filter(super::Node::has_power) {
                let object = nodes.iter().find(|object| object.name_any() == node.name());
                let heartbeat = object.and_then(ready_heartbeat);
                // After a power cut, the Node still has its old conditions, so the heartbeat must be newer than the boot.
                if node.booted_at().is_none_or(|boot| heartbeat.is_none_or(|at| at < boot)) {
                    let log = self.lab.log(node.name());
                    return Err(format!("{} is not Ready; see its log {}", node.name(), log.display()));
                }
                let routes = match self.plan().pod_network {
                    PodNetwork::HostGateway | PodNetwork::Vxlan => node.routes(),
                    PodNetwork::Flannel => flannel_routes(&node, &nodes).await?,
                };
                if let Some(missing) = ready.iter().find(|name| !routes.contains(name)) {
                    return Err(format!("{} has no route to the pods of {missing}", node.name()));
                }
            }
            Ok(())
        })
        .await
    }
}

/// Names of the nodes to whose pods `node` has routes through flannel's device. The name of `node` itself is included if
/// flanneld has given the device its address, the first address of the node's pod range.
async fn flannel_routes(node: &super::Node<'_>, nodes: &[core::Node]) -> std::result::Result<Vec<String>, String> {
    // Fails if the device does not exist yet.
    let words = ["ip", "-j", "route", "show", "table", "all", "dev", FLANNEL_DEVICE];
    let output = node.exec(words).await.map_err(|error| error.to_string())?;
    let routes: Vec<serde_json::Value> = serde_json::from_str(&output.stdout).map_err(|error| error.to_string())?;
    let has_route = |to: &str| routes.iter().any(|route| route["dst"] == to);
    let is_reached = |object: &&core::Node| {
        let range = object.spec.as_ref().and_then(|spec| spec.pod_cidr.as_deref());
        range.is_some_and(|range| match range.split_once('/') {
            Some((first, _)) if object.name_any() == node.name() => has_route(first),
            _ => has_route(range),
        })
    };
    Ok(nodes.iter().filter(is_reached).map(ResourceExt::name_any).collect())
}

/// The last heartbeat of the condition Ready, in seconds since 1970. `None` = Ready is not True.
fn ready_heartbeat(node: &core::Node) -> Option<i64> {
    let conditions = node.status.as_ref()?.conditions.as_ref()?;
    let ready = conditions
        .iter()
        .find(|one| one.type_ == "Ready" && one.status == "True")?;
    Some(ready.last_heartbeat_time.as_ref()?.0.as_second())
}
