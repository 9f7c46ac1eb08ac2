//! The name of a network interface as a value that is safe to put into an nftables script or a sysctl path.

use std::{fmt, str::FromStr};

/// An interface name that Linux accepts (`dev_valid_name`) and that needs no escaping in a quoted string of a script or in a
/// path: 1 to 15 characters, each an ASCII letter, a digit, `-`, `_`, `.` or `@`; not `.` or `..`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InterfaceName(String);

/// Why a text is not an interface name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an interface name: expected 1 to 15 letters, digits, '-', '_', '.' or '@'")]
pub struct InterfaceNameError(String);

impl InterfaceName {
    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for InterfaceName {
    type Err = InterfaceNameError;

    fn from_str(text: &str) -> Result<Self, InterfaceNameError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '@');
        if (1..=15).contains(&text.len()) && text.chars().all(plain) && text != "." && text != ".." {
            Ok(Self(text.to_owned()))
        } else {
            Err(InterfaceNameError(text.chars().take(40).collect()))
        }
    }
}

impl fmt::Display for InterfaceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // threat: script-injection
    #[test]
    fn invalid_interface_name_is_refused() {
        for text in [
            "",
            ".",
            "..",
            "a b",
            "kilo0\"; drop",
            "../all",
            "sixteen-letters-",
            "eth0\n",
        ] {
            assert_eq!(text.parse::<InterfaceName>(), Err(InterfaceNameError(text.to_owned())));
        }
    }

    #[test]
    fn usual_names_are_accepted() {
        for text in ["kilo0", "eth0.100", "veth12@if3", "enp0s31f6", "br-lan_1"] {
            assert_eq!(
                text.parse::<InterfaceName>().map(|n| n.to_string()),
                Ok(text.to_owned())
            );
        }
    }
}
