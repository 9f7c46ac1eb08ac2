//! The commands and flags of `clustermeshctl`. The help text of `--help` is made from these comments.

use std::{num::NonZeroUsize, path::PathBuf};

use clap::{Parser, Subcommand, ValueEnum};
use clustermesh_core::{
    hub::{HubNamespace, HubNetwork, MemberNamespace},
    plan::InfrastructurePort,
};

use crate::verify::UnderlayAllowed;

/// ClusterMesh for Kilo, from the command line.
#[derive(Debug, Parser)]
#[command(name = "clustermeshctl", version, max_term_width = 100)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show what is broken, where, since when, and what to do
    ///
    /// Reads the ClusterMeshes of the hub, with the current context of your kubeconfig, and the controller's Lease. The states are those
    /// that the controller reports. Your account must be able to list ClusterMeshes (with --namespace: in that namespace). If it may
    /// also get the Lease, the output says when no controller runs, and which replica leads.
    ///
    /// --live reads every member too, as `plan` does and with the same rights, and compares it with the plan. Use it when no controller
    /// runs, so that the reported states are old.
    ///
    /// Prints about ten lines: counts, then the problems, the worst first. DOWN: a mesh is not Ready. OPEN: packets that a policy denies
    /// may pass. PART: a part does not work. note: set on purpose, or harmless. Problems with the same reason are one item; --all
    /// shows each.
    ///
    /// Exit code: 0 healthy (there may be notes), 1 a problem, 2 the hub cannot be read, or an error.
    Status(StatusArgs),
    /// Draw the members, their nodes, and the links between them by state
    ///
    /// Reads the same as `status`, which shows the causes. A link is up, partly up (some tunnels are down), down, unknown (the API
    /// server of a member is not reachable, so its nodes' reports are old), or closed (a member is quarantined). Members whose profiles or
    /// grants do not connect them have no link.
    ///
    /// Exit code: 0 done, 2 an error.
    Graph(GraphArgs),
    /// Show the objects that the controller would write into every member, and why a node is left out
    ///
    /// Reads the hub, with the current context of your kubeconfig, and the hub's members. Writes nothing. In the hub, your account
    /// must be able to list ClusterMeshes and to get the Secrets that they name; in every member, the hub included, to list
    /// nodes, peers, peerpolicies, services, endpointslices and pods, and with sandboxes also sandboxaccesses and
    /// sandboxgateways. If a member does not answer, the output names the member and covers the other members.
    ///
    /// With --filename it reads only files. Save the objects of each member and name the file with --cluster:
    ///
    /// kubectl get nodes,peers,services,endpointslices,pods,peerpolicies -A -o yaml
    ///
    /// (with sandboxes also sandboxaccesses,sandboxgateways; without peerpolicies where that CRD is not installed). For a
    /// member without files nothing is planned, and its Peers in other members are kept. Give all ClusterMeshes of the hub,
    /// because the plan treats the objects of a missing ClusterMesh as objects of another hub, and leaves them unchanged. If a
    /// member's files have no Peers, every planned Peer shows as a create. Host names in endpoint annotations are not resolved.
    ///
    /// Exit code: 0 success, 1 error; with --exit-code also 2 when an object would change.
    Plan(PlanArgs),
    /// Show whether a connection is allowed, which rule decides, and which path the packets take
    ///
    /// SRC opens the connection to DST. Write SRC and DST as:
    ///
    ///   CLUSTER/NAMESPACE/POD        mgmt/team-x/web-0
    ///   CLUSTER/NODE                 tenant-a/w1 (the node itself, or a pod in its network)
    ///   ADDRESS                      10.244.1.20, fd00:1::20
    ///   CLUSTER/NAMESPACE/svc/NAME   mgmt/team-x/svc/postgres-rw (only DST; a mirrored
    ///                                Service by its name in the importing cluster)
    ///
    /// CLUSTER is the name of an entry of spec.clusters. Append the port to DST:
    /// mgmt/team-x/svc/postgres-rw:5432, 10.244.1.20:53/udp, [fd00:1::20]:443. The default
    /// protocol is TCP. For a Service write a port of the Service, by number or name. Without a
    /// port, the answer is for all ports except the closed ports that it lists.
    ///
    /// Reads the same input as `plan`. The answer follows from the plan; it also shows which of
    /// the objects are written already. It does not consider NetworkPolicies or the underlay.
    ///
    /// `explain node CLUSTER/NODE` shows the Peers of a node in the other clusters, with their
    /// endpoints, or why it has none.
    ///
    /// Exit code: 0 allowed (for a Service or a node: at least one of its addresses is allowed),
    /// 1 denied, 2 cannot tell, or an error. With `node`: 1 if it has no Peer in some mesh.
    #[command(verbatim_doc_comment)]
    Explain(ExplainArgs),
    /// Probe from nodes and pods of each cluster which sockets answer, and compare with the plan
    ///
    /// Reads the same input as `plan`. Then it runs two short Jobs on each node that it probes
    /// from: one in the node's network and one in a pod network, with the image of wg-agent and
    /// without credentials or capabilities. They open TCP connections to every other cluster: to
    /// the declared ports of pods, to Services (ClusterIP, NodePort, load balancer), to nodes at
    /// all their addresses (ports of kubelet, etcd, API server, agent, SSH), and to the API server.
    /// The report compares the open sockets with the plan, and shows whether each route leads into
    /// the tunnel or to the underlay.
    ///
    /// A sandbox may reach only granted sockets; a member with the profile `standard`, or in
    /// quarantine, may reach none. Both limits apply in the tunnel and on the underlay. With
    /// --underlay-allows, name the addresses that nodes of these members need on the underlay,
    /// except their own API server. Sockets that a cluster-meshed member reaches on the underlay
    /// are listed but are no violation. The results come from nodes and API servers of the probing
    /// cluster: a hostile cluster can hide the sockets that it reaches.
    ///
    /// These Jobs are the only change in any cluster. They are deleted at the end, also after
    /// Ctrl-C; if this program is killed, the cluster removes them within minutes. In addition to
    /// the rights for `plan`, your account needs in the agent's namespace of each probing cluster:
    /// create, get, delete jobs.batch; list pods; get pods/log. The controller's account in a
    /// member has none of these rights: name contexts of your own with --member-context.
    ///
    /// Exit code: 0 all as planned; 1 violation: a socket answers that must not; 2 a socket could not
    /// be probed, or an error; 3 no violation, but an allowed socket does not answer.
    #[command(verbatim_doc_comment)]
    Verify(VerifyArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct ExplainArgs {
    /// The client of the connection; or the word `node`
    #[arg(value_name = "SRC")]
    pub(crate) from: String,

    /// The server of the connection, and the port; after `node`: CLUSTER/NODE
    #[arg(value_name = "DST[:PORT[/PROTOCOL]]")]
    pub(crate) to: String,

    #[command(flatten)]
    pub(crate) input: InputArgs,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    pub(crate) output: Output,
}

#[derive(Debug, clap::Args)]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    pub(crate) input: InputArgs,

    /// Probe only from this cluster; repeatable
    #[arg(long, value_name = "CLUSTER")]
    pub(crate) from: Vec<String>,

    /// Probe only toward this cluster; repeatable
    #[arg(long, value_name = "CLUSTER")]
    pub(crate) to: Vec<String>,

    /// Probe from this many Ready nodes of each cluster, in the order of their names
    #[arg(long, value_name = "N", default_value = "5")]
    pub(crate) nodes: NonZeroUsize,

    /// An address that nodes may reach on the underlay and that is not probed, such as a resolver or a registry; repeatable
    #[arg(long, value_name = "ADDRESS[:PORT]")]
    pub(crate) underlay_allows: Vec<UnderlayAllowed>,

    /// Image that contains wg-agent. Default: the image of the agent's pods in the cluster
    #[arg(long, value_name = "IMAGE")]
    pub(crate) image: Option<String>,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    pub(crate) output: Output,
}

/// The hub that `status` and `graph` read.
#[derive(Debug, clap::Args)]
pub(crate) struct HubArgs {
    /// Kubeconfig with the hub's context. Default: the kubeconfig that kubectl uses
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,

    /// Context of the hub in the kubeconfig. Default: its current context
    #[arg(long, value_name = "CONTEXT")]
    pub(crate) context: Option<String>,

    /// Only the ClusterMeshes of this namespace. Default: all
    #[arg(short, long, value_name = "NAMESPACE")]
    pub(crate) namespace: Option<String>,

    /// The namespace of the controller and its Lease
    #[arg(long, value_name = "NAMESPACE", default_value = "clustermesh")]
    pub(crate) controller_namespace: String,
}

#[derive(Debug, clap::Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pub(crate) hub: HubArgs,

    /// Read every member and the controller's pods now, instead of relying on the controller's reports
    #[arg(short, long, conflicts_with = "watch")]
    pub(crate) live: bool,

    /// Read the member that the meshes call NAME with a context of the hub's kubeconfig; repeatable
    ///
    /// Default: the kubeconfig in the Secret that the member's entry names.
    #[arg(long = "member-context", value_name = "NAME=CONTEXT", value_parser = parse_member_context, requires = "live")]
    pub(crate) members: Vec<(String, String)>,

    /// Show every problem, with its whole message
    #[arg(short, long)]
    pub(crate) all: bool,

    /// Show the status again whenever it changes, until Ctrl-C
    #[arg(short, long)]
    pub(crate) watch: bool,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    pub(crate) output: Output,
}

#[derive(Debug, clap::Args)]
pub(crate) struct GraphArgs {
    #[command(flatten)]
    pub(crate) hub: HubArgs,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    pub(crate) output: GraphOutput,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum GraphOutput {
    /// A line for each member
    #[default]
    Text,
    /// A picture, for a browser
    Svg,
}

/// The input of the commands that plan.
#[derive(Debug, clap::Args)]
pub(crate) struct InputArgs {
    /// ClusterMesh objects: a file, a folder (*.yaml, *.yml, *.json in it and below) or - for standard input; repeatable
    ///
    /// Without this flag, the running hub and every member that its ClusterMeshes name are read.
    #[arg(short, long = "filename", value_name = "FILE|DIR|-")]
    pub(crate) filename: Vec<PathBuf>,

    /// Kubeconfig with the hub's context. Default: the kubeconfig that kubectl uses
    #[arg(long, value_name = "FILE", conflicts_with = "filename")]
    pub(crate) kubeconfig: Option<PathBuf>,

    /// Context of the hub in the kubeconfig. Default: its current context
    #[arg(long, value_name = "CONTEXT", conflicts_with = "filename")]
    pub(crate) context: Option<String>,

    /// Read the member that the meshes call NAME with a context of the hub's kubeconfig; repeatable
    ///
    /// Default: the kubeconfig in the Secret that the member's entry names, as in the controller. This needs the right to read
    /// the Secret, and the API server must be reachable from here at the address in the Secret's kubeconfig.
    #[arg(long = "member-context", value_name = "NAME=CONTEXT", value_parser = parse_member_context, conflicts_with = "filename")]
    pub(crate) members: Vec<(String, String)>,

    /// The controller's flag of the same name; give the same values, so that the same limits apply to meshes; repeatable
    ///
    /// Without this flag, every namespace may have meshes, with members of any profile.
    #[arg(
        long = "hub-namespace",
        value_name = "NAMESPACE[=PROFILE[,CIDR...]]",
        conflicts_with = "filename"
    )]
    pub(crate) hub_namespaces: Vec<HubNamespace>,

    /// The controller's flag of the same name; give the same values; repeatable
    #[arg(
        long = "member-namespace",
        value_name = "NAMESPACE,CIDR[,CIDR...]",
        requires = "hub_namespaces"
    )]
    pub(crate) member_namespaces: Vec<MemberNamespace>,

    /// The controller's flag of the same name; give the same values; repeatable
    #[arg(
        long = "hub-network",
        value_name = "CIDR[,CIDR...]",
        value_delimiter = ',',
        requires = "hub_namespaces"
    )]
    pub(crate) hub_networks: Vec<HubNetwork>,

    /// The controller's flag of the same name; give the same values: ports that are closed in addition to the built-in ports; repeatable
    #[arg(long = "infrastructure-port", value_name = "PORT[/PROTOCOL]")]
    pub(crate) infrastructure_ports: Vec<InfrastructurePort>,

    /// Objects of the member that the meshes call NAME: a file, a folder or -; repeatable, also for one NAME
    ///
    /// Without --filename, this member is read from the files and not from its API server.
    #[arg(long = "cluster", value_name = "NAME=FILE|DIR|-", value_parser = parse_cluster_path)]
    pub(crate) clusters: Vec<(String, PathBuf)>,

    /// Id of the hub, the controller's flag of the same name: the value of the label kilo-clustermesh.io/hub of its objects
    ///
    /// Default: the UID of the Namespace kube-system of the local member. If that UID is not in the input, the id that most
    /// Peers of these meshes have; without Peers, "unknown". Peers of these meshes with another id count as objects of another hub.
    #[arg(long, value_name = "ID", value_parser = parse_hub_id)]
    pub(crate) hub_id: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) input: InputArgs,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    pub(crate) output: Output,

    /// Exit with 2 when an object would change
    #[arg(long)]
    pub(crate) exit_code: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum Output {
    /// For people
    #[default]
    Table,
    /// Everything, as YAML
    Yaml,
    /// Everything, as JSON
    Json,
}

fn parse_cluster_path(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => Ok((name.to_owned(), path.into())),
        _ => Err("write NAME=FILE_OR_DIR, NAME being the name of an entry of spec.clusters".to_owned()),
    }
}

fn parse_member_context(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, context)) if !name.is_empty() && !context.is_empty() => Ok((name.to_owned(), context.to_owned())),
        _ => Err("write NAME=CONTEXT, NAME being the name of an entry of spec.clusters".to_owned()),
    }
}

fn parse_hub_id(text: &str) -> Result<String, String> {
    let is_allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    let first_and_last = text.bytes().next().zip(text.bytes().last());
    let has_allowed_bytes = text.len() <= 63 && text.bytes().all(is_allowed);
    if has_allowed_bytes
        && first_and_last.is_some_and(|(first, last)| first.is_ascii_alphanumeric() && last.is_ascii_alphanumeric())
    {
        Ok(text.to_owned())
    } else {
        Err("must be a label value: 1 to 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or digit".to_owned())
    }
}
