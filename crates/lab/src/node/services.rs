//! Runs a node's services as a service manager: starts them in order, restarts them when they exit, and reaps all
//! children.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::wait::{WaitStatus, wait};

use super::{PolicyEngine, Settings, cni, config, flannel};
use crate::PodNetwork;
use crate::image::IMPORT;
use crate::plan::comma_separated;

/// The name and command line of a service. The name is also a part of the log file's name.
struct Service {
    name: &'static str,
    argv: Vec<String>,
}

pub(super) fn run(settings: &Settings, settings_path: &Path) -> Result<()> {
    let path = settings
        .programs
        .iter()
        .map(|directory| format!("{}:", directory.display()))
        .collect::<String>();
    let environment = [
        (
            "PATH",
            format!("{path}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
        ),
        ("HOME", "/root".into()),
        ("HOSTNAME", settings.name.clone()),
        ("GOMAXPROCS", "2".into()),
    ];
    let manager = Manager {
        settings,
        environment: environment.into(),
    };
    manager.write_configuration()?;
    let mut running = BTreeMap::new();
    let containerd = Service {
        name: "containerd",
        argv: vec![
            manager.program("containerd")?,
            "--config".into(),
            config::CONTAINERD.into(),
        ],
    };
    running.insert(manager.start(&containerd)?, containerd);
    Manager::wait_for_containerd()?;
    manager.import_images()?;
    wait_for_file(
        &settings.cluster_directory().join("api-ready"),
        Duration::from_secs(300),
    )?;
    for service in manager.kubernetes_services(settings_path)? {
        running.insert(manager.start(&service)?, service);
    }
    if settings.pod_network == PodNetwork::Flannel {
        // In another thread, because this one must restart flanneld, which may exit while the Node has no pod range yet.
        std::thread::spawn(|| {
            if let Err(error) = flannel::enable_plugin() {
                eprintln!("flannel: {error:#}");
            }
        });
    }
    loop {
        let (WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..)) = wait()? else {
            continue;
        };
        if let Some(service) = running.remove(&pid.as_raw()) {
            eprintln!("{} exited; restarting it", service.name);
            // The delay limits the CPU usage of a service that exits at once.
            std::thread::sleep(Duration::from_millis(500));
            running.insert(manager.start(&service)?, service);
        }
    }
}

struct Manager<'a> {
    settings: &'a Settings,
    environment: BTreeMap<&'static str, String>,
}

impl Manager<'_> {
    fn program(&self, name: &str) -> Result<String> {
        Ok(self.settings.program(name)?.display().to_string())
    }

    fn write_configuration(&self) -> Result<()> {
        for directory in ["/opt/cni/bin", config::CNI, "/etc/containerd"] {
            fs::create_dir_all(directory)?;
        }
        let plugins = self.settings.program("cni")?;
        for plugin in fs::read_dir(plugins)? {
            let plugin = plugin?;
            let link = Path::new("/opt/cni/bin").join(plugin.file_name());
            let _ = fs::remove_file(&link);
            symlink(plugin.path(), link)?;
        }
        match self.settings.pod_network {
            PodNetwork::HostGateway => fs::write(config::CNI_TEMPLATE, config::cni_template(0))?,
            PodNetwork::Vxlan => fs::write(config::CNI_TEMPLATE, config::cni_template(cni::overlay_mtu()?))?,
            PodNetwork::Flannel => flannel::write_configuration(self.settings)?,
        }
        if let Some(resolver) = self.settings.resolver {
            // The file may be a symlink to one that the node does not have.
            let _ = fs::remove_file(config::RESOLV_CONF);
            fs::write(config::RESOLV_CONF, format!("nameserver {resolver}\n"))?;
        }
        let has_template = self.settings.pod_network != PodNetwork::Flannel;
        let containerd = config::containerd(&self.settings.program("runc")?, has_template);
        fs::write(config::CONTAINERD, containerd)?;
        fs::write("/run/kubelet.yaml", config::kubelet(self.settings))?;
        fs::write("/run/proxy.yaml", config::proxy(self.settings))?;
        Ok(())
    }

    /// The services that need the API server.
    fn kubernetes_services(&self, settings_path: &Path) -> Result<Vec<Service>> {
        let kubeconfig = self.settings.directory().join("kubelet.kubeconfig");
        let kubelet = vec![
            self.program("kubelet")?,
            "--config=/run/kubelet.yaml".into(),
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--hostname-override={}", self.settings.name),
            format!("--node-ip={}", comma_separated(&self.settings.addresses)),
            "--v=2".into(),
        ];
        let proxy = vec![self.program("kube-proxy")?, "--config=/run/proxy.yaml".into()];
        let cni = match self.settings.pod_network {
            PodNetwork::Flannel => Service {
                name: "flanneld",
                argv: flannel::argv(self.settings)?,
            },
            // Starts this program again. Its file is not mounted in the node, but /proc/self/exe still opens it.
            PodNetwork::HostGateway | PodNetwork::Vxlan => Service {
                name: "cni",
                argv: vec![
                    "/proc/self/exe".into(),
                    "cni".into(),
                    settings_path.display().to_string(),
                ],
            },
        };
        let mut services = vec![
            Service {
                name: "kubelet",
                argv: kubelet,
            },
            Service {
                name: "kube-proxy",
                argv: proxy,
            },
            cni,
        ];
        if let Some((at, to)) = self.settings.api_forward {
            services.push(Service {
                name: "api",
                argv: vec![
                    "/proc/self/exe".into(),
                    "forward".into(),
                    at.to_string(),
                    to.to_string(),
                ],
            });
        }
        let argv = match &self.settings.policies {
            None => return Ok(services),
            Some(PolicyEngine::Own) => vec![
                "/proc/self/exe".into(),
                "policies".into(),
                settings_path.display().to_string(),
            ],
            Some(PolicyEngine::KubeRouter {
                program,
                services: service_cidrs,
            }) => vec![
                program.display().to_string(),
                "--run-firewall=true".into(),
                "--run-router=false".into(),
                "--run-service-proxy=false".into(),
                "--health-port=0".into(),
                format!("--hostname-override={}", self.settings.name),
                format!("--service-cluster-ip-range={}", comma_separated(service_cidrs)),
                format!(
                    "--kubeconfig={}",
                    self.settings.cluster_directory().join("inside.kubeconfig").display()
                ),
            ],
        };
        services.push(Service { name: "policies", argv });
        Ok(services)
    }

    fn start(&self, service: &Service) -> Result<i32> {
        let log = self
            .settings
            .run
            .join("log")
            .join(format!("{}-{}.log", self.settings.name, service.name));
        let log = fs::File::options().create(true).append(true).open(log)?;
        let child = self
            .command(&service.argv[0])
            .args(&service.argv[1..])
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("start {}", service.argv[0]))?;
        Ok(i32::try_from(child.id())?)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env_clear().envs(&self.environment).stdin(Stdio::null());
        command
    }

    /// Waits until containerd accepts connections. It does so only after it has loaded its plugins.
    fn wait_for_containerd() -> Result<()> {
        let start = Instant::now();
        while UnixStream::connect(config::CONTAINERD_SOCKET).is_err() {
            anyhow::ensure!(
                start.elapsed() < Duration::from_secs(120),
                "containerd does not accept connections after 120 s"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Imports the images of the lab and those of this cluster, all in parallel.
    fn import_images(&self) -> Result<()> {
        let ctr = self.program("ctr")?;
        let directories = [
            self.settings.run.join("images"),
            self.settings.cluster_directory().join("images"),
        ];
        let archives = directories
            .iter()
            .filter_map(|directory| fs::read_dir(directory).ok())
            .flatten();
        let archives = archives
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|p| p.extension().is_some_and(|e| e == "tar"));
        let archives: Vec<PathBuf> = archives.collect();
        let mut imports = vec![];
        for archive in archives {
            let mut command = self.command(&ctr);
            command.args(IMPORT).arg(&archive);
            imports.push((command.spawn()?, archive));
        }
        for (mut import, archive) in imports {
            anyhow::ensure!(import.wait()?.success(), "cannot import {}", archive.display());
        }
        Ok(())
    }
}

pub(super) fn wait_for_file(file: &Path, timeout: Duration) -> Result<()> {
    let start = Instant::now();
    while !file.exists() {
        anyhow::ensure!(start.elapsed() < timeout, "{} did not appear", file.display());
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}
