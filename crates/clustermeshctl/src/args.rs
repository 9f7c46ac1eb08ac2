//! The command line: which commands and flags there are. What they do is in the module of each command.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};

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
    /// Reads files alone and reaches no cluster. Save what stands in each member and name it with --cluster:
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
    /// Reads the files that `plan` reads and reaches no cluster. The answer is what the planner
    /// decides for them, and whether the objects stand already is told beside it. It knows
    /// nothing of NetworkPolicies, nor of what the underlay lets through beside the mesh.
    ///
    /// Exit code: 0 allowed (of a Service or a node: some address of it is), 1 denied,
    /// 2 cannot tell, errors included.
    #[command(verbatim_doc_comment)]
    Explain(ExplainArgs),
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

/// What every command reads.
#[derive(Debug, clap::Args)]
pub(crate) struct GivenArgs {
    /// ClusterMesh objects: a file, a folder (*.yaml, *.yml, *.json in it and below) or - for standard input; repeatable
    #[arg(short, long = "filename", value_name = "FILE|DIR|-", required = true)]
    pub(crate) filename: Vec<PathBuf>,

    /// What stands in the member that the meshes call NAME: a file, a folder or -; repeatable, also for one NAME
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
