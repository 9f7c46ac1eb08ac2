//! Renders kernel modules and settings as commands or configuration to paste, for the supported operating systems.

use std::fmt::Write;

/// Kernel modules to load at boot, and kernel settings with their values.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HostSetup {
    /// Such as `tun`.
    pub modules: Vec<&'static str>,
    /// Such as `net.ipv4.ip_forward`, 1.
    pub sysctls: Vec<(String, u8)>,
}

impl HostSetup {
    /// Whether there is nothing to set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.modules.is_empty() && self.sysctls.is_empty()
    }

    /// Commands for root on systems with systemd and a shell, such as Debian and Ubuntu.
    #[must_use]
    pub fn debian(&self) -> String {
        let mut out = String::new();
        if !self.modules.is_empty() {
            let _ = writeln!(
                out,
                "cat >/etc/modules-load.d/clustermesh.conf <<E\n{}E",
                self.module_lines("")
            );
            let _ = writeln!(out, "systemctl restart systemd-modules-load");
        }
        if !self.sysctls.is_empty() {
            let _ = writeln!(
                out,
                "cat >/etc/sysctl.d/90-clustermesh.conf <<E\n{}E",
                self.sysctl_lines("")
            );
            let _ = writeln!(out, "systemctl restart systemd-sysctl");
        }
        out
    }

    /// A patch of the Talos machine configuration, for `talosctl patch mc`.
    #[must_use]
    pub fn talos(&self) -> String {
        let mut out = String::from("machine:\n");
        if !self.modules.is_empty() {
            out.push_str("  kernel:\n    modules:\n");
            for module in &self.modules {
                let _ = writeln!(out, "    - name: {module}");
            }
        }
        if !self.sysctls.is_empty() {
            out.push_str("  sysctls:\n");
            for (name, value) in &self.sysctls {
                let _ = writeln!(out, "    {name}: \"{value}\"");
            }
        }
        out
    }

    /// A Butane configuration for Flatcar, from which the machine's Ignition configuration is generated.
    #[must_use]
    pub fn flatcar(&self) -> String {
        let mut out = String::from("variant: flatcar\nversion: 1.0.0\nstorage:\n  files:\n");
        let mut file = |path: &str, lines: String| {
            let _ = write!(out, "  - path: {path}\n    contents:\n      inline: |\n{lines}");
        };
        if !self.modules.is_empty() {
            file("/etc/modules-load.d/clustermesh.conf", self.module_lines("        "));
        }
        if !self.sysctls.is_empty() {
            file("/etc/sysctl.d/90-clustermesh.conf", self.sysctl_lines("        "));
        }
        out
    }

    /// The texts for all three systems, each with a heading; empty if there is nothing to set.
    #[must_use]
    pub fn for_all_systems(&self) -> String {
        if self.is_empty() {
            return String::new();
        }
        format!(
            "Debian and similar systems, as root:\n\n{}\nTalos, machine configuration:\n\n{}\nFlatcar, Butane:\n\n{}",
            self.debian(),
            self.talos(),
            self.flatcar()
        )
    }

    fn module_lines(&self, indent: &str) -> String {
        self.modules
            .iter()
            .map(|module| format!("{indent}{module}\n"))
            .collect()
    }

    fn sysctl_lines(&self, indent: &str) -> String {
        let lines = self.sysctls.iter();
        lines
            .map(|(name, value)| format!("{indent}{name} = {value}\n"))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_given_parts_are_rendered() {
        assert_eq!(HostSetup::default().for_all_systems(), "");
        let tun = HostSetup {
            modules: vec!["tun"],
            sysctls: Vec::new(),
        };
        assert_eq!(
            tun.debian(),
            "cat >/etc/modules-load.d/clustermesh.conf <<E\ntun\nE\nsystemctl restart systemd-modules-load\n"
        );
        assert_eq!(tun.talos(), "machine:\n  kernel:\n    modules:\n    - name: tun\n");
        assert!(!tun.flatcar().contains("sysctl"));
        let forward = HostSetup {
            modules: Vec::new(),
            sysctls: vec![("net.ipv4.ip_forward".to_owned(), 1)],
        };
        assert_eq!(
            forward.talos(),
            "machine:\n  sysctls:\n    net.ipv4.ip_forward: \"1\"\n"
        );
        assert_eq!(
            forward.flatcar(),
            "variant: flatcar\nversion: 1.0.0\nstorage:\n  files:\n  - path: /etc/sysctl.d/90-clustermesh.conf\n    contents:\n      \
             inline: |\n        net.ipv4.ip_forward = 1\n"
        );
    }

    #[test]
    fn install_page_shows_the_output_of_preflight() {
        let all = HostSetup {
            modules: vec!["tun", "wireguard"],
            sysctls: crate::prepare::settings(true)
                .iter()
                .map(|sysctl| (sysctl.name.to_string(), sysctl.value))
                .collect(),
        };
        let page = include_str!("../../../../docs/operations/install.md");
        for (system, text) in [
            ("Debian", all.debian()),
            ("Talos", all.talos()),
            ("Flatcar", all.flatcar()),
        ] {
            assert!(
                page.contains(&text),
                "{system}: docs/operations/install.md does not contain\n{text}"
            );
        }
    }
}
