#compdef codelia
# Completion of codelia for zsh. The program itself finds the candidates.
_codelia() {
    local -a candidates
    candidates=(${(f)"$(${~words[1]} __complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( ! ${#candidates} )); then
        _files
        return
    fi
    compadd -- ${candidates:#*[:/]}
    compadd -S '' -- ${(M)candidates:#*[:/]}
}
compdef _codelia codelia
