# Completion of codelia for bash. The program itself finds the candidates.
_codelia() {
    local line=${COMP_LINE:0:COMP_POINT} words current
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    current=${words[-1]}
    mapfile -t COMPREPLY < <("${words[0]/#\~/$HOME}" __complete -- "${words[@]:1}" 2>/dev/null)
    # Readline completes only what follows the last colon.
    if [[ $current == *:* && $COMP_WORDBREAKS == *:* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${current%"${current##*:}"}"}")
    fi
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[:/] ]]; then
        compopt -o nospace
    fi
}
complete -o default -F _codelia codelia
