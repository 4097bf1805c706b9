# Completes shardbook in fish. In ~/.config/fish/config.fish: shardbook completion fish | source
function _shardbook_words
    switch "$argv[1]"
@words@
    end
end
function _shardbook_values
    switch "$argv[1]"
@values@
    end
end
function _shardbook
    set -l given (commandline -opc)
    set -l word (commandline -ct)
    if string match -q -- '*=*' $word
        set -l key (string split -m 1 = -- $word)[1]
        for value in (_shardbook_values $key)
            echo $key=$value
        end
    else if test (count $given) -eq 1
        _shardbook_words ""
    else if not _shardbook_values $given[-1] | string match -e ''
        _shardbook_words $given[2]
    end
end
complete -c shardbook -a '(_shardbook)'
