from nostall.cli import main

main()
