//! Which addresses a sandbox may be connected to: public ones, and the operator's exceptions.

use std::{
    collections::HashSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
    time::{Duration, Instant},
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use parking_lot::Mutex;

use crate::refusal::Reason;

/// How long the addresses of this host's interfaces are remembered.
const MAX_AGE: Duration = Duration::from_secs(1);

/// The IANA registry of special-use IPv4 addresses.
const SPECIAL_V4: [Ipv4Net; 18] = [
    v4([0, 0, 0, 0], 8),
    v4([10, 0, 0, 0], 8),
    v4([100, 64, 0, 0], 10),
    v4([127, 0, 0, 0], 8),
    v4([169, 254, 0, 0], 16),
    v4([172, 16, 0, 0], 12),
    v4([192, 0, 0, 0], 24),
    v4([192, 0, 2, 0], 24),
    v4([192, 31, 196, 0], 24),
    v4([192, 52, 193, 0], 24),
    v4([192, 88, 99, 0], 24),
    v4([192, 168, 0, 0], 16),
    v4([192, 175, 48, 0], 24),
    v4([198, 18, 0, 0], 15),
    v4([198, 51, 100, 0], 24),
    v4([203, 0, 113, 0], 24),
    // Multicast.
    v4([224, 0, 0, 0], 4),
    // Reserved, and broadcast.
    v4([240, 0, 0, 0], 4),
];

/// The only addresses of IPv6 that are global unicast today.
const GLOBAL_V6: Ipv6Net = v6([0x2000, 0, 0, 0, 0, 0, 0, 0], 3);

/// The special-use blocks among them.
const SPECIAL_V6: [Ipv6Net; 6] = [
    // IETF protocols: Teredo, benchmarks, ORCHID and others.
    v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 23),
    v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32),
    // 6to4.
    v6([0x2002, 0, 0, 0, 0, 0, 0, 0], 16),
    v6([0x2620, 0x4f, 0x8000, 0, 0, 0, 0, 0], 48),
    // 6bone, returned to IANA.
    v6([0x3ffe, 0, 0, 0, 0, 0, 0, 0], 16),
    // Documentation.
    v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20),
];

/// Services of clouds that give out credentials. No exception opens them.
const METADATA: [IpNet; 8] = [
    IpNet::V4(v4([169, 254, 0, 0], 16)),
    IpNet::V4(v4([100, 100, 100, 200], 32)),
    IpNet::V4(v4([192, 0, 0, 192], 32)),
    IpNet::V4(v4([168, 63, 129, 16], 32)),
    IpNet::V6(v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0], 32)),
    IpNet::V6(v6([0xfd20, 0xce, 0, 0, 0, 0, 0, 0], 32)),
    IpNet::V6(v6([0xfd00, 0x42, 0, 0, 0, 0, 0, 0], 32)),
    IpNet::V6(v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10)),
];

const fn v4(octets: [u8; 4], prefix: u8) -> Ipv4Net {
    let [a, b, c, d] = octets;
    Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix)
}

const fn v6(segments: [u16; 8], prefix: u8) -> Ipv6Net {
    let [a, b, c, d, e, f, g, h] = segments;
    Ipv6Net::new_assert(Ipv6Addr::new(a, b, c, d, e, f, g, h), prefix)
}

/// The addresses that a sandbox may be connected to.
#[derive(Debug)]
pub(crate) struct AddressRules {
    exceptions: Vec<IpNet>,
    own: Vec<IpAddr>,
    interfaces: Mutex<Option<(Instant, Arc<HashSet<IpAddr>>)>>,
}

impl AddressRules {
    pub(crate) fn new(exceptions: Vec<IpNet>, own: Vec<IpAddr>) -> Self {
        Self { exceptions, own, interfaces: Mutex::new(None) }
    }

    /// Checks an address and the IPv4 address in it, if there is one.
    pub(crate) fn check(&self, address: IpAddr) -> Result<(), Reason> {
        let embedded = match address {
            IpAddr::V4(_) => None,
            IpAddr::V6(address) => embedded_v4(address).map(IpAddr::V4),
        };
        [Some(address), embedded]
            .into_iter()
            .flatten()
            .try_for_each(|address| self.check_one(address))
    }

    fn check_one(&self, address: IpAddr) -> Result<(), Reason> {
        if self.is_own(address) {
            return Err(Reason::OwnAddress);
        }
        if METADATA.iter().any(|net| net.contains(&address)) {
            return Err(Reason::SpecialAddress);
        }
        if is_special(address) && !self.exceptions.iter().any(|net| net.contains(&address)) {
            return Err(Reason::SpecialAddress);
        }
        Ok(())
    }

    /// Loopback is special, not own: an exception may open it for services next to the proxy.
    fn is_own(&self, address: IpAddr) -> bool {
        if self.own.contains(&address) {
            return true;
        }
        if address.is_loopback() {
            return false;
        }
        match self.interfaces() {
            Ok(interfaces) => interfaces.contains(&address),
            // An address that cannot be checked is refused.
            Err(error) => {
                tracing::error!(%error, "cannot list the addresses of this host");
                true
            }
        }
    }

    fn interfaces(&self) -> Result<Arc<HashSet<IpAddr>>, codelia_sys::Errno> {
        let mut cached = self.interfaces.lock();
        if let Some((read, addresses)) = &*cached
            && read.elapsed() < MAX_AGE
        {
            return Ok(addresses.clone());
        }
        let addresses =
            Arc::new(codelia_sys::interfaces::addresses()?.into_iter().collect::<HashSet<_>>());
        *cached = Some((Instant::now(), addresses.clone()));
        Ok(addresses)
    }
}

fn is_special(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => SPECIAL_V4.iter().any(|net| net.contains(&address)),
        IpAddr::V6(address) => {
            !GLOBAL_V6.contains(&address) || SPECIAL_V6.iter().any(|net| net.contains(&address))
        }
    }
}

/// The IPv4 address that a mapped, compatible, translated (NAT64), 6to4 or Teredo address leads to.
fn embedded_v4(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let [a, b, c, d, e, f, g, h] = address.segments();
    let join = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        Some(Ipv4Addr::new(a, b, c, d))
    };
    match [a, b, c, d, e, f] {
        [0, 0, 0, 0, 0, 0 | 0xffff] | [0, 0, 0, 0, 0xffff, 0] | [0x64, 0xff9b, 0, 0, 0, 0] => {
            join(g, h)
        }
        // Local NAT64 (RFC 8215), as if its prefix had 96 bits. It is special in any case.
        [0x64, 0xff9b, 1, ..] => join(g, h),
        [0x2002, high, low, ..] => join(high, low),
        [0x2001, 0, ..] => join(!g, !h),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rules: &AddressRules, address: &str) -> Result<(), Reason> {
        rules.check(address.parse().unwrap())
    }

    #[test]
    fn special_addresses_are_refused() {
        let rules = AddressRules::new(Vec::new(), Vec::new());
        let special = [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "10.255.255.255",
            "100.64.0.1",
            "100.100.100.200",
            "127.0.0.1",
            "127.255.255.254",
            "169.254.169.254",
            "169.254.170.2",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.1",
            "192.0.0.192",
            "192.0.2.1",
            "192.31.196.1",
            "192.52.193.1",
            "192.88.99.1",
            "192.168.0.1",
            "192.175.48.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "168.63.129.16",
            "::",
            "::1",
            "::7f00:1",
            "::ffff:127.0.0.1",
            "::ffff:8.8.8.8",
            "::ffff:0:127.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b::808:808",
            "64:ff9b:1::a00:1",
            "100::1",
            "2001::1",
            "2001:0:5ef5:79fd::1",
            "2001:2::1",
            "2001:10::1",
            "2001:20::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "2002:808:808::1",
            "2620:4f:8000::1",
            "3ffe::1",
            "3fff::1",
            "4000::1",
            "5f00::1",
            "fc00::1",
            "fd00::1",
            "fd00:ec2::254",
            "fd20:ce::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "ff0e::1",
        ];
        for address in special {
            assert_eq!(check(&rules, address), Err(Reason::SpecialAddress), "{address}");
        }
    }

    #[test]
    fn public_addresses_are_allowed() {
        let rules = AddressRules::new(Vec::new(), Vec::new());
        let public = [
            "1.1.1.1",
            "8.8.8.8",
            "93.184.216.34",
            "100.63.255.255",
            "100.128.0.1",
            "172.15.0.1",
            "172.32.0.1",
            "192.0.1.1",
            "198.17.255.255",
            "198.20.0.1",
            "223.255.255.255",
            "2001:200::1",
            "2606:4700:4700::1111",
            "2a00:1450:4001::1",
            "2620:4f:8001::1",
        ];
        for address in public {
            assert_eq!(check(&rules, address), Ok(()), "{address}");
        }
    }

    #[test]
    fn exceptions_open_private_but_not_metadata_or_own() {
        let exceptions =
            ["10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "64:ff9b::/96", "fd00::/8", "::/96"];
        let exceptions = exceptions.map(|net| net.parse().unwrap()).to_vec();
        let rules = AddressRules::new(exceptions, vec!["10.0.0.9".parse().unwrap()]);
        for address in ["10.1.2.3", "127.0.0.1", "fd01::1", "64:ff9b::a00:1", "64:ff9b::808:808"] {
            assert_eq!(check(&rules, address), Ok(()), "{address}");
        }
        for address in
            ["169.254.169.254", "fd00:ec2::254", "64:ff9b::a9fe:a9fe", "::a9fe:a9fe", "192.168.0.1"]
        {
            assert_eq!(check(&rules, address), Err(Reason::SpecialAddress), "{address}");
        }
        for address in ["10.0.0.9", "64:ff9b::a00:9"] {
            assert_eq!(check(&rules, address), Err(Reason::OwnAddress), "{address}");
        }
    }

    #[test]
    fn addresses_of_interfaces_are_own() {
        let rules = AddressRules::new(
            vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()],
            Vec::new(),
        );
        let interfaces = codelia_sys::interfaces::addresses().unwrap();
        assert!(interfaces.iter().any(|address| address.is_loopback()), "{interfaces:?}");
        let link_local = |address: &IpAddr| METADATA.iter().any(|net| net.contains(address));
        for address in
            interfaces.into_iter().filter(|address| !address.is_loopback() && !link_local(address))
        {
            assert_eq!(rules.check(address), Err(Reason::OwnAddress), "{address}");
        }
    }
}
