//! The command line: which commands and flags there are. What they do is in the module of each command.

use std::{num::NonZeroUsize, path::PathBuf};

use clap::{Parser, Subcommand, ValueEnum};
use clustermesh_core::{
    hub::{HubNamespace, HubNetwork, MemberNamespace},
    plan::InfrastructurePort,
};

use crate::verify::Allowed;

/// ClusterMesh for Kilo, from the command line.
#[derive(Debug, Parser)]
#[command(name = "clustermeshctl", version, max_term_width = 100)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show what the controller would write into every member, and why a node is left out
    ///
    /// Reads the hub and its members, with the current context of your kubeconfig as the hub's; writes nothing. The account
    /// has to list ClusterMeshes and get the Secrets they name in the hub, and to list nodes, peers, peerpolicies, services,
    /// endpointslices and pods in every member, the hub too. A member that does not answer is named, and the rest is planned.
    ///
    /// With --filename it reads files alone and reaches no cluster. Save what stands in each member and name it with --cluster:
    ///
    /// kubectl get nodes,peers,services,endpointslices,pods,peerpolicies -A -o yaml
    ///
    /// (without peerpolicies where that CRD is not there). A member that is not given was not seen: nothing is planned for
    /// it and nothing is deleted because of it. The same holds for a ClusterMesh that is not given, so give all of the
    /// hub. Without Peers in a member's files, everything is a create. Names in endpoint annotations are not looked up.
    ///
    /// Exit code: 0 done, 1 error; with --exit-code 2 when something would change.
    Plan(PlanArgs),
    /// Say whether one connection is let through, by which rule, and on which way
    ///
    /// SRC opens it, DST answers. Write either as:
    ///
    ///   CLUSTER/NAMESPACE/POD        mgmt/team-x/web-0
    ///   CLUSTER/NODE                 tenant-a/w1 (the node itself, or a pod in its network)
    ///   ADDRESS                      10.244.1.20, fd00:1::20
    ///   CLUSTER/NAMESPACE/svc/NAME   mgmt/team-x/svc/postgres-rw (DST alone; a mirrored
    ///                                Service too, by the name it has where it is used)
    ///
    /// CLUSTER is the name of an entry of spec.clusters. A port goes behind DST:
    /// mgmt/team-x/svc/postgres-rw:5432, 10.244.1.20:53/udp, [fd00:1::20]:443. TCP unless
    /// said; of a Service its own port, by number or name. Without one, any is asked for.
    ///
    /// Reads what `plan` reads, from the clusters or from files. The answer is what the planner
    /// decides for it, and whether the objects stand already is told beside it. It knows
    /// nothing of NetworkPolicies, nor of what the underlay lets through beside the mesh.
    ///
    /// Exit code: 0 allowed (of a Service or a node: some address of it is), 1 denied,
    /// 2 cannot tell, errors included.
    #[command(verbatim_doc_comment)]
    Explain(ExplainArgs),
    /// Try for real what may be reached, from nodes and pods of each cluster, and report
    ///
    /// Reads what `plan` reads, then runs one short Job for each node that is tried from and one
    /// for a pod of its own there, with the image of wg-agent and no rights. Each tries TCP
    /// connections to the pods' declared ports, the Services (ClusterIP, NodePort, load balancer),
    /// the nodes (their own addresses and those in the mesh, with the ports of kubelet, etcd, API
    /// server, agent, SSH) and the API server of every other cluster. What is open is held against
    /// what the planner says, and whether a route led into the tunnel or beside it.
    ///
    /// A sandbox (standard and quarantined members too) may reach what is granted and nothing
    /// else, on the underlay neither: name with --underlay-allows what its nodes need beside its
    /// own API server. What a trusted member reaches beside the mesh is told and is no violation.
    /// The answers are those of nodes and API servers of the cluster that is tried from: one that
    /// lies hides what its own side can do.
    ///
    /// Nothing is changed in any cluster but these Jobs, which are deleted at the end, on Ctrl-C
    /// too; were this program killed, the cluster ends and removes them within minutes. Rights,
    /// in each cluster that is tried from, in the agent's namespace, beside those of `plan`:
    /// create, get, delete jobs.batch; list pods; get pods/log. The account of deploy/ in a member
    /// has none of these: name contexts of your own with --member-context.
    ///
    /// Exit code: 0 all as planned; 1 something answers that nothing grants; 2 something could not
    /// be tried, errors included; 3 something that is granted does not answer, all else as planned.
    #[command(verbatim_doc_comment)]
    Verify(VerifyArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct ExplainArgs {
    /// Who opens the connection
    #[arg(value_name = "SRC")]
    pub(crate) from: String,

    /// Whom to, with the port
    #[arg(value_name = "DST[:PORT[/PROTOCOL]]")]
    pub(crate) to: String,

    #[command(flatten)]
    pub(crate) given: GivenArgs,

    /// Form of the output
    #[arg(short, long, value_enum, default_value_t)]
    pub(crate) output: Output,
}

#[derive(Debug, clap::Args)]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    pub(crate) given: GivenArgs,

    /// Try from this cluster alone; repeatable
    #[arg(long, value_name = "CLUSTER")]
    pub(crate) from: Vec<String>,

    /// Try toward this cluster alone; repeatable
    #[arg(long, value_name = "CLUSTER")]
    pub(crate) to: Vec<String>,

    /// From how many Ready nodes of each cluster, the first by name
    #[arg(long, value_name = "N", default_value = "5")]
    pub(crate) nodes: NonZeroUsize,

    /// What nodes may reach on the underlay, and is not tried: resolvers, registries; repeatable
    #[arg(long, value_name = "ADDRESS[:PORT]")]
    pub(crate) underlay_allows: Vec<Allowed>,

    /// Image with wg-agent. Default: that of the agent's pods in the cluster
    #[arg(long, value_name = "IMAGE")]
    pub(crate) image: Option<String>,

    /// Form of the output
    #[arg(short, long, value_enum, default_value_t)]
    pub(crate) output: Output,
}

/// What every command reads.
#[derive(Debug, clap::Args)]
pub(crate) struct GivenArgs {
    /// ClusterMesh objects: a file, a folder (*.yaml, *.yml, *.json in it and below) or - for standard input; repeatable
    ///
    /// Without it the ClusterMeshes of the hub are read, and what stands in it and in every member that they name.
    #[arg(short, long = "filename", value_name = "FILE|DIR|-")]
    pub(crate) filename: Vec<PathBuf>,

    /// Kubeconfig with the hub's context. Default: as kubectl finds it
    #[arg(long, value_name = "FILE", conflicts_with = "filename")]
    pub(crate) kubeconfig: Option<PathBuf>,

    /// Context of the hub in that kubeconfig. Default: its current context
    #[arg(long, value_name = "CONTEXT", conflicts_with = "filename")]
    pub(crate) context: Option<String>,

    /// Read the member that the meshes call NAME with a context of that kubeconfig; repeatable
    ///
    /// Default: the kubeconfig in the Secret that its entry names, as the controller does; that needs the right to read the
    /// Secret, and an API server that is reached from here under the same name.
    #[arg(long = "member-context", value_name = "NAME=CONTEXT", value_parser = context, conflicts_with = "filename")]
    pub(crate) members: Vec<(String, String)>,

    /// As the controller's flag of that name, with the same values, so that a mesh is bounded as it is there; repeatable
    ///
    /// Without it every namespace may have a mesh, of any profile.
    #[arg(
        long = "hub-namespace",
        value_name = "NAMESPACE[=PROFILE[,CIDR...]]",
        conflicts_with = "filename"
    )]
    pub(crate) hub_namespaces: Vec<HubNamespace>,

    /// As the controller's flag of that name, with the same values; repeatable
    #[arg(
        long = "member-namespace",
        value_name = "NAMESPACE,CIDR[,CIDR...]",
        requires = "hub_namespaces"
    )]
    pub(crate) member_namespaces: Vec<MemberNamespace>,

    /// As the controller's flag of that name, with the same values; repeatable
    #[arg(
        long = "hub-network",
        value_name = "CIDR[,CIDR...]",
        value_delimiter = ',',
        requires = "hub_namespaces"
    )]
    pub(crate) hub_networks: Vec<HubNetwork>,

    /// As the controller's flag of that name, with the same values: ports closed beside the built-in ones; repeatable
    #[arg(long = "infrastructure-port", value_name = "PORT[/PROTOCOL]")]
    pub(crate) infrastructure_ports: Vec<InfrastructurePort>,

    /// What stands in the member that the meshes call NAME: a file, a folder or -; repeatable, also for one NAME
    ///
    /// Beside a hub that is read: in place of asking that member.
    #[arg(long = "cluster", value_name = "NAME=FILE|DIR|-", value_parser = source)]
    pub(crate) clusters: Vec<(String, PathBuf)>,

    /// Id of the hub, as the controller's flag of that name: what the label kilo-clustermesh.io/hub of our objects says
    ///
    /// Default: the UID of the Namespace kube-system in the files of the local member; without that the id that most Peers
    /// of these meshes carry; without any, "unknown". Peers of these meshes with another id are someone else's.
    #[arg(long, value_name = "ID", value_parser = hub_id)]
    pub(crate) hub_id: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) given: GivenArgs,

    /// Form of the output
    #[arg(short, long, value_enum, default_value_t)]
    pub(crate) output: Output,

    /// Exit with 2 when something would change
    #[arg(long)]
    pub(crate) exit_code: bool,
}

/// Form of the output.
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

fn source(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => Ok((name.to_owned(), path.into())),
        _ => Err("write NAME=FILE_OR_DIR, NAME being the name of an entry of spec.clusters".to_owned()),
    }
}

fn context(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, context)) if !name.is_empty() && !context.is_empty() => Ok((name.to_owned(), context.to_owned())),
        _ => Err("write NAME=CONTEXT, NAME being the name of an entry of spec.clusters".to_owned()),
    }
}

fn hub_id(text: &str) -> Result<String, String> {
    let inner = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    let ends = text.bytes().next().zip(text.bytes().last());
    let fits = text.len() <= 63 && text.bytes().all(inner);
    if fits && ends.is_some_and(|(first, last)| first.is_ascii_alphanumeric() && last.is_ascii_alphanumeric()) {
        Ok(text.to_owned())
    } else {
        Err("must be a label's value: 1 to 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or digit".to_owned())
    }
}
