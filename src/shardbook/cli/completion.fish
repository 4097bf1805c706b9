# Completes shardbook in fish. In ~/.config/fish/config.fish: shardbook completion fish | source
@tables@
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
