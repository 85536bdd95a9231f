fn mask_exclude_self_permits(s: Site) -> bool {
    return distance(s) != 0;
}
