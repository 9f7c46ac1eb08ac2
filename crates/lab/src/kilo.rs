//! Runs Kilo on the nodes of clusters, as its manifests for userspace WireGuard do: a DaemonSet with `kg` and wireguard-go. Kilo cannot be
//! installed from a package registry, so the user names the program `kg` in the environment variable `KG_BIN`.

use std::path::{Path, PathBuf};

use crate::{ArtefactSet, Cluster, Error, ImageSpec, Lab, Result, Tools, command};

/// Environment variable with the path of Kilo's program `kg`, statically linked.
pub const KG_BIN: &str = "KG_BIN";
const NAMESPACE: &str = "kube-system";

/// How `kg` connects the nodes of a cluster (`--mesh-granularity`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Granularity {
    /// A tunnel between every two nodes.
    Full,
    /// Tunnels between the leaders of locations. A location is a value of the label `topology.kubernetes.io/region`.
    Location,
    /// A tunnel between every two nodes of different locations. Only a patched `kg` has it: see [`Kilo::knows`].
    Cross,
}

impl Granularity {
    /// The value of the flag.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Location => "location",
            Self::Cross => "cross",
        }
    }
}

/// Kilo's image, built from the program that `KG_BIN` names.
#[derive(Debug)]
pub struct Kilo<'a> {
    lab: &'a Lab,
    program: PathBuf,
    image: PathBuf,
}

impl<'a> Kilo<'a> {
    /// Writes the image.
    ///
    /// # Errors
    /// When `KG_BIN` is not set, or a file of the image does not exist.
    pub fn new(lab: &'a Lab) -> Result<Self> {
        let kg = Self::program()?;
        let tools = Tools::ensure(&[ArtefactSet::WireguardGo], &|line| eprintln!("lab: {line}"))?;
        let image = lab.directory().join("kilo.tar");
        let spec = ImageSpec::new("lab.local/kilo:1")
            .program(&kg, "/bin/kg")?
            .program(&tools.path("wireguard-go")?, "/bin/wireguard-go")?;
        with_iptables(spec)?.write(&image)?;
        Ok(Self {
            lab,
            program: kg,
            image,
        })
    }

    /// The program that `KG_BIN` names.
    ///
    /// # Errors
    /// When `KG_BIN` is not the absolute path of a file.
    pub fn program() -> Result<PathBuf> {
        let kg = PathBuf::from(std::env::var_os(KG_BIN).unwrap_or_default());
        if kg.is_absolute() && kg.is_file() {
            return Ok(kg);
        }
        Err(Error::Missing {
            what: format!("an absolute path of a file in the environment variable {KG_BIN} (now {:?})", kg.display().to_string()),
            remedy: "set it to the path of Kilo's program kg (0.7.0 or later, statically linked), such as the file /opt/bin/kg of the \
                     image squat/kilo"
                .into(),
        })
    }

    /// Whether `kg` has this granularity, according to its `--help`.
    ///
    /// # Errors
    /// When `kg` cannot be run.
    pub async fn knows(&self, granularity: Granularity) -> Result<bool> {
        let program = self.program.display().to_string();
        let help = command::run(&[program, "--help".into()], None).await?.stdout;
        let mut lines = help.lines();
        let line = lines.find(|line| line.contains("--mesh-granularity"));
        Ok(line.is_some_and(|line| line.contains(granularity.as_str())))
    }

    /// Installs the CRD of Peers and `kg` on all nodes of a cluster, with the cluster's WireGuard range as `--subnet`. If `kg` is
    /// installed, changes its granularity. Waits for the rollout.
    ///
    /// # Errors
    /// When the cluster refuses a manifest, or the rollout does not end in time.
    pub async fn install(&self, cluster: &Cluster<'_>, granularity: Granularity) -> Result<()> {
        cluster.load_image(&self.image).await?;
        cluster.install_crds(&["peers"]).await?;
        let manifest = include_str!("kilo/kilo.yaml")
            .replace("GRANULARITY", granularity.as_str())
            .replace("SUBNET", &cluster.plan().wireguard_cidr.to_string());
        cluster.apply(&manifest).await?;
        cluster.wait_for_rollout(NAMESPACE, "daemonset/kilo").await
    }

    /// The metrics of `kg` on a node.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn metrics(&self, node: &str) -> Result<String> {
        let node = self.lab.node(node);
        Ok(node
            .exec(["curl", "-sSf", "-m", "5", "http://127.0.0.1:1107/metrics"])
            .await?
            .stdout)
    }
}

/// Adds iptables, which `kg` runs, with its extensions.
fn with_iptables(spec: ImageSpec) -> Result<ImageSpec> {
    let program = Path::new("/usr/sbin/xtables-nft-multi");
    let extensions = std::fs::read_dir("/usr/lib")
        .map_err(Error::io("read /usr/lib"))?
        .filter_map(|entry| Some(entry.ok()?.path().join("xtables")))
        .find(|directory| directory.is_dir())
        .ok_or_else(|| Error::Missing {
            what: "the extensions of iptables in /usr/lib/*/xtables".into(),
            remedy: "install iptables (Debian, Ubuntu: iptables)".into(),
        })?;
    let mut spec = spec.program(program, "/usr/sbin/xtables-nft-multi")?;
    for name in ["iptables", "ip6tables"] {
        spec = spec.link(&format!("/usr/sbin/{name}"), "xtables-nft-multi");
    }
    for entry in std::fs::read_dir(&extensions).map_err(Error::io(format!("read {}", extensions.display())))? {
        let path = entry.map_err(Error::io("read an extension of iptables"))?.path();
        spec = spec.file(&path, &path.display().to_string());
    }
    Ok(spec)
}
