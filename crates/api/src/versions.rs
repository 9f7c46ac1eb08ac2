//! The versions of other programs that work with this version of the project, from `versions.json`, which is compiled in.
//! `cargo xtask versions` renders it into `docs/versions.md`.

use std::sync::LazyLock;

use clustermesh_core::versions::{Supported, Version};
use serde::{Deserialize, Deserializer, de};

/// The supported versions of every program.
pub static VERSIONS: LazyLock<Versions> = LazyLock::new(|| {
    // A unit test parses the same text.
    #[allow(clippy::expect_used, reason = "the text is part of the program")]
    serde_json::from_str(include_str!("versions.json")).expect("versions.json is valid")
});

/// The supported versions by program.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Versions {
    /// The API servers of members with wg-agent or gateways, and of the hub.
    pub kubernetes: Program,
    /// wg-agent, next to a controller of this version.
    pub agent: Program,
    /// The kernels of nodes with wg-agent or gateways.
    pub kernel: Program,
    /// `nft`, which wg-agent runs.
    pub nft: Program,
    /// Kilo's program `kg`.
    pub kilo: Program,
}

/// The supported versions of one program. Texts are Markdown.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Program {
    /// The program, and where it runs.
    pub name: String,
    /// The oldest version that is known to work.
    #[serde(deserialize_with = "version")]
    pub oldest: Version,
    /// The newest version that is known not to work. Older versions do not work either.
    #[serde(deserialize_with = "optional_version")]
    pub refused: Option<Version>,
    /// Why older versions do not work.
    pub why: String,
    /// Where this is documented, as URLs.
    pub sources: Vec<String>,
    /// The versions that tests run with.
    #[serde(deserialize_with = "versions")]
    pub tested: Vec<Version>,
    /// Which tests run with them.
    pub shown_by: String,
    /// What the controller or wg-agent does if the program has another version.
    pub outside: String,
}

impl Versions {
    /// Every program, in the order of the document.
    #[must_use]
    pub fn programs(&self) -> [&Program; 5] {
        let Self {
            kubernetes,
            agent,
            kernel,
            nft,
            kilo,
        } = self;
        [kubernetes, agent, kernel, nft, kilo]
    }

    /// The versions that the controller checks.
    #[must_use]
    pub fn supported(&self) -> Supported {
        let tested = self.kubernetes.tested.iter().max();
        Supported {
            oldest_kubernetes: self.kubernetes.oldest,
            tested_kubernetes: tested.copied().unwrap_or(self.kubernetes.oldest),
            oldest_kernel: self.kernel.oldest,
            oldest_agent: self.agent.oldest,
        }
    }
}

fn parse<E: de::Error>(text: &str) -> Result<Version, E> {
    Version::parse(text).ok_or_else(|| E::custom(format!("{text:?} is not a version")))
}

fn version<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Version, D::Error> {
    parse(&String::deserialize(deserializer)?)
}

fn optional_version<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Version>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    text.map(|text| parse(&text)).transpose()
}

fn versions<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Version>, D::Error> {
    let texts = Vec::<String>::deserialize(deserializer)?;
    texts.iter().map(|text| parse(text)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_versions_are_older_than_working_and_tested_ones() {
        for program in VERSIONS.programs() {
            let name = &program.name;
            assert!(program.refused.is_none_or(|refused| refused < program.oldest), "{name}");
            assert!(!program.tested.is_empty(), "{name}");
            assert!(program.tested.iter().all(|tested| *tested >= program.oldest), "{name}");
        }
    }

    /// The agent and the controller of one release work together.
    #[test]
    fn own_version_is_a_tested_agent() {
        let own = Version::parse(env!("CARGO_PKG_VERSION")).unwrap();
        assert!(VERSIONS.agent.tested.contains(&own), "{own}");
    }
}
