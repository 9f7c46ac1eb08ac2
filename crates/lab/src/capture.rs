//! Captures packets on the underlay, or on one or all links of a node, with tcpdump.

use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::command::{self, Running, argv};
use crate::{Lab, Node, Result};

/// A running capture of the frames that match a filter: on the underlay's bridge, on one node's eth0, or on all links of a node.
#[derive(Debug)]
pub struct Capture {
    tcpdump: Running,
    file: PathBuf,
}

impl Lab {
    /// Starts a capture on the underlay, with a pcap filter. The files of the capture begin with `name`. Returns when
    /// tcpdump captures.
    ///
    /// # Errors
    /// When tcpdump is missing or refuses the filter.
    pub async fn capture(&self, name: &str, filter: &str) -> Result<Capture> {
        self.capture_at(&self.underlay_netns(), "br0", name, filter).await
    }

    async fn capture_at(&self, netns: &Path, link: &str, name: &str, filter: &str) -> Result<Capture> {
        let file = self.directory().join("log").join(format!("{name}.pcap"));
        let path = file.display().to_string();
        // Without `-Z root` tcpdump drops its privileges and cannot write into the run directory.
        let words = argv([
            "nsenter",
            &format!("--net={}", netns.display()),
            "tcpdump",
            "-i",
            link,
            "-nn",
            "-U",
            "--immediate-mode",
            "-Z",
            "root",
            "-w",
            &path,
            filter,
        ]);
        let mut tcpdump = Running::start(&words, &self.log(&format!("{name}-tcpdump")), false)?;
        tcpdump.wait_for_log("listening on", Duration::from_secs(20)).await?;
        Ok(Capture { tcpdump, file })
    }
}

impl Node<'_> {
    /// Starts a capture on all links of this node, as [`Lab::capture`] does on the underlay.
    ///
    /// # Errors
    /// As [`Lab::capture`].
    pub async fn capture_on_all_links(&self, name: &str, filter: &str) -> Result<Capture> {
        self.lab().capture_at(&self.netns(), "any", name, filter).await
    }

    /// Starts a capture on this node's eth0, as [`Lab::capture`] does on the underlay.
    ///
    /// # Errors
    /// As [`Lab::capture`].
    pub async fn capture(&self, name: &str, filter: &str) -> Result<Capture> {
        self.lab().capture_at(&self.netns(), "eth0", name, filter).await
    }
}

impl Capture {
    /// Ends the capture. The pcap file is deleted with the lab.
    ///
    /// # Errors
    /// When tcpdump does not exit.
    pub async fn stop(mut self) -> Result<Captured> {
        self.tcpdump.signal(Signal::SIGINT)?;
        self.tcpdump.wait_for_exit(Duration::from_secs(20)).await?;
        Ok(Captured { file: self.file })
    }
}

/// A finished capture.
#[derive(Debug, Clone)]
pub struct Captured {
    file: PathBuf,
}

impl Captured {
    /// The pcap file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The packets that match a filter, one line each as `tcpdump -nn -r` prints them (numeric, with time).
    ///
    /// # Errors
    /// When tcpdump refuses the filter.
    pub async fn packets(&self, filter: &str) -> Result<Vec<String>> {
        let words = argv(["tcpdump", "-nn", "-r", &self.file.display().to_string(), filter]);
        let output = command::run(&words, None).await?;
        Ok(output.stdout.lines().map(str::to_owned).collect())
    }
}
