//! Parses flag values.

use std::{str::FromStr, time::Duration};

use clap::ValueEnum;
use clustermesh_agent_core::mtu;

use crate::device::Backend;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendFlag {
    /// The kernel's WireGuard if available, else userspace.
    Auto,
    /// The kernel's WireGuard.
    Kernel,
    /// WireGuard in this process, over a TUN device.
    Userspace,
}

impl From<BackendFlag> for Backend {
    fn from(flag: BackendFlag) -> Self {
        match flag {
            BackendFlag::Kernel => Self::Kernel,
            BackendFlag::Userspace => Self::Userspace,
            BackendFlag::Auto => Self::Auto,
        }
    }
}

/// The task of this process on a node or in a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ModeFlag {
    /// This agent owns the tunnel.
    Full,
    /// kg owns the tunnel, and this agent only the firewall table.
    Policy,
    /// This process is a gateway: a pod through which sandboxes enter the cluster.
    Gateway,
}

/// MTU of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mtu {
    /// Derived from the path MTU to each peer.
    Auto,
    /// Fixed, in bytes.
    Fixed(u16),
}

impl FromStr for Mtu {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        match text.parse::<u16>() {
            Ok(bytes) if bytes >= mtu::MINIMUM => Ok(Self::Fixed(bytes)),
            _ => Err(format!(
                "expected `auto` or a number of bytes from {} to 65535",
                mtu::MINIMUM
            )),
        }
    }
}

/// Parses a duration such as `24h`, `1h30m` or `90s`.
pub(super) fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = |why: String| format!("{why}; write hours, minutes or seconds, such as 24h, 90m or 30s");
    let span: jiff::SignedDuration = text.parse().map_err(|error: jiff::Error| wrong(error.to_string()))?;
    Duration::try_from(span).map_err(|_| wrong("it must not be negative".to_owned()))
}

/// Parses the timeout of a gateway's grants: at least 10 s, rounded down to whole seconds, the unit of the agent's nftables timeouts.
pub(super) fn parse_grant_timeout(text: &str) -> Result<Duration, String> {
    const MINIMUM_SECONDS: u64 = 10;
    match parse_duration(text)? {
        time if time.as_secs() < MINIMUM_SECONDS => Err(format!(
            "a timeout of less than {MINIMUM_SECONDS}s leaves no time to renew the grants"
        )),
        time => Ok(Duration::from_secs(time.as_secs())),
    }
}
