# Completion of codelia for fish. The program itself finds the candidates.
function __codelia_candidates
    set -l words (commandline -opc)
    $words[1] __complete -- $words[2..-1] (commandline -ct) 2>/dev/null
end
complete -c codelia -a '(__codelia_candidates)'
