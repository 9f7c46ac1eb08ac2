//! Detects from Cilium's settings whether packets of pods bypass netfilter.

use std::collections::BTreeMap;

/// Returns why packets of pods bypass the host's network stack, and so nftables and policy routing rules; `None` = they do not.
/// `settings` is Cilium's ConfigMap `cilium-config`. The conditions are those of Cilium's
/// `Documentation/operations/performance/tuning.rst` (eBPF host routing) and `initKubeProxyReplacementOptions`.
#[must_use]
pub fn cilium_bypass(settings: &BTreeMap<String, String>) -> Option<&'static str> {
    let is = |key: &str, values: &[&str]| settings.get(key).is_some_and(|value| values.contains(&value.as_str()));
    if is("datapath-mode", &["netkit", "netkit-l2"]) {
        return Some("datapath-mode is netkit");
    }
    // Cilium uses host routing in BPF if it replaces kube-proxy and masquerades in BPF or not at all, unless legacy routing is set.
    let masquerades_without_iptables = is("enable-bpf-masquerade", &["true"])
        || (is("enable-ipv4-masquerade", &["false"]) && !is("enable-ipv6-masquerade", &["true"]));
    let replaces_kube_proxy = is("kube-proxy-replacement", &["true", "strict"]);
    let uses_legacy_routing = is("enable-host-legacy-routing", &["true"]);
    (masquerades_without_iptables && replaces_kube_proxy && !uses_legacy_routing)
        .then_some("kube-proxy-replacement and masquerading in BPF imply host routing in BPF")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bypass_is_detected_from_the_settings_of_cilium() {
        let bypass = |text: &str| {
            let pairs = text.split_whitespace().filter_map(|pair| pair.split_once('='));
            cilium_bypass(&pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect())
        };
        let implied = Some("kube-proxy-replacement and masquerading in BPF imply host routing in BPF");
        assert_eq!(bypass(""), None);
        assert_eq!(
            bypass("kube-proxy-replacement=true enable-bpf-masquerade=true"),
            implied
        );
        assert_eq!(
            bypass("kube-proxy-replacement=strict enable-ipv4-masquerade=false"),
            implied
        );
        assert_eq!(bypass("kube-proxy-replacement=false enable-bpf-masquerade=true"), None);
        assert_eq!(bypass("kube-proxy-replacement=true enable-bpf-masquerade=false"), None);
        assert_eq!(
            bypass("kube-proxy-replacement=true enable-bpf-masquerade=true enable-host-legacy-routing=true"),
            None
        );
        assert_eq!(
            bypass("datapath-mode=netkit enable-host-legacy-routing=true"),
            Some("datapath-mode is netkit")
        );
    }
}
