//! Lists the programs of each set and the flags to build them.

use std::path::PathBuf;

const KUBERNETES_VERSION: &str = "v1.36.3";
const CONTAINERD_MODULE: &str = "github.com/containerd/containerd/v2";
const CLUSTER_API_MODULE: &str = "sigs.k8s.io/cluster-api";
const FLANNEL_MODULE: &str = "github.com/flannel-io/flannel";

/// A group of programs that are built and cached together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum ArtefactSet {
    /// etcd, kube-apiserver, kubectl.
    ControlPlane,
    /// kube-controller-manager, kube-scheduler, kubelet, kube-proxy.
    Nodes,
    /// containerd, its shim, ctr, runc and the CNI plugins (in `cni/`).
    Runtime,
    /// CoreDNS.
    Dns,
    /// wireguard-go, for benchmarks, interoperability tests, and tests that simulate kg.
    WireguardGo,
    /// flanneld.
    Flannel,
    /// The CNI plugin `flannel`. It has its own set, because it and flanneld need different versions of one module.
    FlannelPlugin,
    /// clusterctl of Cluster API.
    Clusterctl,
}

/// One `go build`.
pub(super) struct GoBuild {
    /// The path of the program in the set's directory.
    pub(super) output: &'static str,
    pub(super) package: String,
    pub(super) tags: &'static str,
    /// The value of the linker flag `-X`. Empty = the flag is not used.
    pub(super) define: String,
    /// Whether the build needs a C compiler, and links statically. libseccomp is available to it.
    pub(super) cgo_static: bool,
}

impl GoBuild {
    fn new(output: &'static str, package: impl Into<String>) -> Self {
        Self {
            output,
            package: package.into(),
            tags: "",
            define: String::new(),
            cgo_static: false,
        }
    }
}

impl ArtefactSet {
    /// All sets.
    pub const ALL: [Self; 8] = [
        Self::ControlPlane,
        Self::Nodes,
        Self::Runtime,
        Self::Dns,
        Self::WireguardGo,
        Self::Flannel,
        Self::FlannelPlugin,
        Self::Clusterctl,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::ControlPlane => "control-plane",
            Self::Nodes => "nodes",
            Self::Runtime => "runtime",
            Self::Dns => "dns",
            Self::WireguardGo => "wireguard-go",
            Self::Flannel => "flannel",
            Self::FlannelPlugin => "flannel-cni",
            Self::Clusterctl => "clusterctl",
        }
    }

    /// The directory of the go.mod that pins its programs.
    pub(super) fn source(self) -> PathBuf {
        let module = match self {
            Self::ControlPlane | Self::Nodes => "k8s",
            Self::Runtime => "runtime",
            Self::Dns => "dns",
            Self::WireguardGo => "wireguard",
            Self::Flannel => "flannel",
            Self::FlannelPlugin => "flannel-cni",
            Self::Clusterctl => "clusterctl",
        };
        PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tools")).join(module)
    }

    pub(super) fn builds(self) -> Vec<GoBuild> {
        let kubernetes = |output| GoBuild {
            define: format!("k8s.io/component-base/version.gitVersion={KUBERNETES_VERSION}"),
            ..GoBuild::new(output, format!("k8s.io/kubernetes/cmd/{output}"))
        };
        let cni = |output: &'static str, package| {
            GoBuild::new(
                output,
                format!("github.com/containernetworking/plugins/plugins/{package}"),
            )
        };
        match self {
            Self::ControlPlane => vec![
                GoBuild::new("etcd", "go.etcd.io/etcd/server/v3"),
                kubernetes("kube-apiserver"),
                kubernetes("kubectl"),
            ],
            Self::Nodes => ["kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy"]
                .map(kubernetes)
                .into(),
            Self::Runtime => vec![
                GoBuild {
                    tags: "no_btrfs,no_devmapper,no_zfs,no_aufs,no_tracing",
                    define: format!("{CONTAINERD_MODULE}/version.Version=v2.4.2"),
                    ..GoBuild::new("containerd", format!("{CONTAINERD_MODULE}/cmd/containerd"))
                },
                GoBuild {
                    tags: "no_grpc",
                    ..GoBuild::new(
                        "containerd-shim-runc-v2",
                        format!("{CONTAINERD_MODULE}/cmd/containerd-shim-runc-v2"),
                    )
                },
                GoBuild::new("ctr", format!("{CONTAINERD_MODULE}/cmd/ctr")),
                cni("cni/bridge", "main/bridge"),
                cni("cni/loopback", "main/loopback"),
                cni("cni/host-local", "ipam/host-local"),
                cni("cni/portmap", "meta/portmap"),
                GoBuild {
                    tags: "seccomp,netgo,osusergo",
                    define: "main.version=1.5.2".into(),
                    cgo_static: true,
                    ..GoBuild::new("runc", "github.com/opencontainers/runc")
                },
            ],
            Self::Dns => vec![GoBuild::new("coredns", ".")],
            Self::WireguardGo => vec![GoBuild::new("wireguard-go", "golang.zx2c4.com/wireguard")],
            // On amd64, flanneld's backend `udp` is written in C.
            Self::Flannel => vec![GoBuild {
                tags: "netgo,osusergo",
                define: format!("{FLANNEL_MODULE}/pkg/version.Version=v0.28.10"),
                cgo_static: true,
                ..GoBuild::new("flanneld", FLANNEL_MODULE)
            }],
            Self::FlannelPlugin => vec![cni("flannel", "meta/flannel")],
            Self::Clusterctl => vec![GoBuild {
                define: format!("{CLUSTER_API_MODULE}/version.gitVersion=v1.13.6"),
                ..GoBuild::new("clusterctl", format!("{CLUSTER_API_MODULE}/cmd/clusterctl"))
            }],
        }
    }

    /// The paths of the programs in the set's directory.
    pub(super) fn outputs(self) -> impl Iterator<Item = &'static str> {
        self.builds().into_iter().map(|build| build.output)
    }

    /// All packages and flags of the set, as a part of the cache key.
    pub(super) fn recipe(self) -> String {
        let line = |b: GoBuild| format!("{} {} {} {} {}\n", b.output, b.package, b.tags, b.define, b.cgo_static);
        self.builds().into_iter().map(line).collect()
    }
}
