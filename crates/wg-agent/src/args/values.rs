//! Parses flag values.

use std::{str::FromStr, time::Duration};

use clap::ValueEnum;
use clustermesh_agent_core::mtu;

use crate::device::Backend;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendFlag {
    /// The kernel's WireGuard where there is one, else userspace.
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

/// Who owns the tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ModeFlag {
    /// This agent owns the tunnel.
    Full,
    /// kg owns the tunnel.
    Policy,
    /// This process is a pod through which sandboxes enter.
    Gateway,
}

/// MTU of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mtu {
    /// From the path MTU to each peer.
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

/// A duration, such as `24h`, `1h30m`, `90s`.
pub(super) fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = |why: String| format!("{why}; write hours, minutes or seconds, as 24h, 90m or 30s");
    let span: jiff::SignedDuration = text.parse().map_err(|error: jiff::Error| wrong(error.to_string()))?;
    Duration::try_from(span).map_err(|_| wrong("it must not be negative".to_owned()))
}

/// A duration of at least 10 s, in whole seconds as nftables timeouts are.
pub(super) fn parse_grant_timeout(text: &str) -> Result<Duration, String> {
    const LEAST: u64 = 10;
    match parse_duration(text)? {
        time if time.as_secs() < LEAST => Err(format!("a time of less than {LEAST}s leaves no time to renew it")),
        time => Ok(Duration::from_secs(time.as_secs())),
    }
}
