//! Runs flannel as the CNI of a node, with the files and flags of flannel's manifest.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;

use super::services::wait_for_file;
use super::{Settings, config};

/// The CNI configuration. Its `cniVersion` is older than in flannel's manifest: the lab's plugin is too old for the newer one.
const CONFLIST: &str = r#"{"name": "cbr0", "cniVersion": "0.3.1", "plugins": [
  {"type": "flannel", "delegate": {"hairpinMode": true, "isDefaultGateway": true}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
"#;

/// Writes the configuration of flanneld and installs the plugin.
pub(super) fn write_configuration(settings: &Settings) -> Result<()> {
    let network = settings.pod_cidrs.first().context("no pod range")?;
    let configuration = json!({"Network": network, "Backend": {"Type": "vxlan"}});
    fs::create_dir_all("/etc/kube-flannel")?;
    fs::write("/etc/kube-flannel/net-conf.json", configuration.to_string())?;
    let plugin = Path::new("/opt/cni/bin/flannel");
    let _ = fs::remove_file(plugin);
    symlink(settings.program("flannel")?, plugin)?;
    Ok(())
}

/// Waits until flanneld has set up the node, then writes the CNI configuration, which makes the Node Ready. If the configuration
/// were written earlier, kubelet would start pods that the plugin refuses, and would try again up to 15 s later.
pub(super) fn enable_plugin() -> Result<()> {
    wait_for_file(Path::new("/run/flannel/subnet.env"), Duration::from_secs(180))?;
    // containerd must not read a partial file.
    let file = Path::new(config::CNI).join("10-flannel.conflist");
    fs::write(file.with_extension("partial"), CONFLIST)?;
    fs::rename(file.with_extension("partial"), file).context("rename the CNI configuration")
}

/// The command line of flanneld. It writes /run/flannel/subnet.env, which the plugin needs.
pub(super) fn argv(settings: &Settings) -> Result<Vec<String>> {
    let kubeconfig = settings.cluster_directory().join("flannel.kubeconfig");
    Ok(vec![
        "env".into(),
        // In a pod, flanneld would read this name from the API server.
        format!("NODE_NAME={}", settings.name),
        settings.program("flanneld")?.display().to_string(),
        "--ip-masq".into(),
        "--kube-subnet-mgr".into(),
        format!("--kubeconfig-file={}", kubeconfig.display()),
    ])
}
