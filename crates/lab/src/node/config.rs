//! Renders the configuration files of containerd, kubelet and kube-proxy, and the CNI template.

use std::path::Path;

use super::Settings;
use crate::plan::comma_separated;

pub(super) const CONTAINERD: &str = "/etc/containerd/config.toml";
/// The default of containerd and ctr.
pub(super) const CONTAINERD_SOCKET: &str = "/run/containerd/containerd.sock";
/// Not the default directory: there containerd would use a network that podman may have configured.
pub(super) const CNI: &str = "/run/cni-net.d";
pub(super) const RESOLV_CONF: &str = "/etc/resolv.conf";
pub(super) const CNI_TEMPLATE: &str = "/etc/containerd/cni.template";

/// A template of the CNI configuration. containerd inserts the node's pod ranges when the Node has them.
/// An MTU of 0 is the default of the interface.
pub(super) fn cni_template(mtu: u16) -> String {
    r#"{"cniVersion": "1.0.0", "name": "lab", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true, "ipMasq": false, "mtu": MTU,
   "ipam": {"type": "host-local",
    "ranges": [{{range $i, $net := .PodCIDRRanges}}{{if $i}}, {{end}}[{"subnet": "{{$net}}"}]{{end}}],
    "routes": [{{range $i, $net := .Routes}}{{if $i}}, {{end}}{"dst": "{{$net}}"}{{end}}]}},
  {"type": "portmap", "backend": "nftables", "capabilities": {"portMappings": true}}]}
"#
    .replace("MTU", &mtu.to_string())
}

/// containerd's configuration. Without the template, the files in [`CNI`] are the CNI configuration.
pub(super) fn containerd(runc: &Path, has_template: bool) -> String {
    let template = if has_template { CNI_TEMPLATE } else { "" };
    let unused = ["btrfs", "zfs", "devmapper", "blockfile", "erofs"]
        .map(|name| format!("'io.containerd.snapshotter.v1.{name}', "))
        .concat();
    format!(
        "version = 3
root = '/var/lib/containerd'
state = '/run/containerd'
disabled_plugins = [{unused}'io.containerd.nri.v1.nri', 'io.containerd.tracing.processor.v1.otlp']
[plugins.'io.containerd.cri.v1.images']
  snapshotter = 'overlayfs'
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = 'lab.local/pause:1'
[plugins.'io.containerd.cri.v1.runtime']
  disable_apparmor = true
  # a process without CAP_SYS_RESOURCE cannot lower oom_score_adj
  restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dirs = ['/opt/cni/bin']
  conf_dir = '{CNI}'
  conf_template = '{template}'
  use_internal_loopback = true
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = 'io.containerd.runc.v2'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
  BinaryName = '{}'
  SystemdCgroup = false
",
        runc.display()
    )
}

pub(super) fn kubelet(settings: &Settings) -> String {
    format!(
        "apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
cgroupDriver: cgroupfs
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
failSwapOn: false
oomScoreAdj: 0
# all nodes use the host's memory, also for their disks; a shortage of memory or disk space must not evict pods
evictionHard: {{memory.available: \"0%\", nodefs.available: \"0%\", nodefs.inodesFree: \"0%\", imagefs.available: \"0%\"}}
imageGCHighThresholdPercent: 100
enforceNodeAllocatable: [pods]
makeIPTablesUtilChains: false
resolvConf: \"{}\"
clusterDNS: [\"{}\"]
clusterDomain: cluster.local
authentication: {{anonymous: {{enabled: true}}, webhook: {{enabled: false}}}}
authorization: {{mode: AlwaysAllow}}
address: {}
healthzPort: 0
",
        if settings.resolver.is_some() { RESOLV_CONF } else { "" },
        settings.dns,
        settings.addresses[0]
    )
}

pub(super) fn proxy(settings: &Settings) -> String {
    format!(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: {}
clusterCIDR: \"{}\"
hostnameOverride: {}
clientConnection: {{kubeconfig: {}}}
# 0 = do not change these sysctls, which are the host's
conntrack: {{maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}}
oomScoreAdj: 0
healthzBindAddress: \"\"
metricsBindAddress: \"\"
",
        settings.proxy.as_str(),
        comma_separated(&settings.pod_cidrs),
        settings.name,
        settings.cluster_directory().join("proxy.kubeconfig").display()
    )
}
